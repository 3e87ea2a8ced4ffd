"""Blocks of a launch: those that were tuned for its sizes or for near ones (tuning/*.json), else config.py's choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ._bridge.tuning import look_up
from .config import (
    LANES,
    Config,
    choose_config,
    choose_weight_gradient_config,
    forward_vmem_bytes,
    weight_gradient_vmem_bytes,
)

FOLDER = Path(__file__).parent / "tuning"
OPS = ("forward", "forward-transposed", "weight-gradient")  # transposed: weights stored as (g, n, k)


def tuned_config(
    op: str, m: int, k: int, n: int, g: int, dtype: str, dtype_bytes: int, device_kind: str | None
) -> Config:
    """Blocks for (m, k) @ (g, k, n), or for the (g, k, n) gradient of its weights, never over the VMEM limit.

    Raises   ValueError: not even the smallest blocks fit the limit.
    """
    default = default_config(op, m, k, n, g, dtype_bytes, device_kind)

    def adapt(config: Config, tuned: Any) -> Config | None:
        return fitted(op, config, tuned, m, k, n, dtype_bytes)

    return look_up("ragged-dot", FOLDER, device_kind, sizes(op, m, k, n, g, dtype), default, adapt)


def default_config(op: str, m: int, k: int, n: int, g: int, dtype_bytes: int, device_kind: str | None) -> Config:
    """What config.py chooses."""
    if op == "weight-gradient":
        return choose_weight_gradient_config(m, k, n, g, dtype_bytes)
    transposed = op == "forward-transposed"
    return choose_config(m, k, n, g, dtype_bytes, device_kind=device_kind, transposed=transposed)


def sizes(op: str, m: int, k: int, n: int, g: int, dtype: str) -> dict[str, Any]:
    """What a tuned entry is found by; k is summed over, also where the weights are stored transposed."""
    return {"op": op, "dtype": dtype, "m": m, "k": k, "n": n, "g": g}


def dtype_name(*arrays: Any) -> str:
    """As tuned entries spell it: bfloat16, or bfloat16,float32 for two different ones."""
    return ",".join(dict.fromkeys(str(array.dtype) for array in arrays))


def fitted(op: str, config: Config, tuned: Any, m: int, k: int, n: int, dtype_bytes: int) -> Config | None:
    """`config`, found at the sizes `tuned`, for these sizes; None where it can't be launched or may not fit VMEM."""
    needed = weight_gradient_vmem_bytes if op == "weight-gradient" else forward_vmem_bytes
    config = replace(
        config,
        block_m=min(config.block_m, -(-m // 16) * 16),
        # What spanned a whole axis there spans the whole axis here.
        block_k=k if config.block_k >= tuned["k"] else config.block_k,
        block_n=n if config.block_n >= tuned["n"] else config.block_n,
    )
    launchable = (
        config.block_m % 16 == 0
        and config.block_m <= 16384
        and all(block == size or (block % LANES == 0 and block < size) for block, size in _axes(config, k, n))
        and config.chunk % LANES == 0
        and config.vmem_limit_bytes <= Config.vmem_limit_bytes
    )
    # A quarter more than the estimate, as config.py leaves to the compiler.
    return config if launchable and needed(config, dtype_bytes) * 5 <= config.vmem_limit_bytes * 4 else None


def _axes(config: Config, k: int, n: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (config.block_k, k), (config.block_n, n)
