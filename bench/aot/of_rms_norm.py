"""Programs of rms-norm: forward and backward, with and without a residual, and XLA's own lowering of the definition."""

from __future__ import annotations

import functools
import math
from typing import Any

from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.programs import Program, Workload
from pallas_hub.bench.aot.shapes import is_shape, parse_shape
from pallas_hub.bench.kernel_source import load_jax_module

OPS = ("forward", "backward")
PEERS = ("xla",)
EPS = 1e-6


def cases() -> list[Workload]:
    """Forward and backward of each model's layers."""
    return [Workload(op, case.name) for case in load_jax_module("rms-norm", "cases").MODEL_CASES for op in OPS]


def build(op: str, case_name: str, impl: str, blocks: dict[str, int] | None) -> Program:
    """One op on one case. `blocks` are fields of the kernel's Config."""
    import jax
    import jax.numpy as jnp

    case = find_case(case_name)
    dtype = jnp.dtype(case.dtype)
    x, weight = jax.ShapeDtypeStruct((case.m, case.n), dtype), jax.ShapeDtypeStruct((case.n,), dtype)
    args = {
        ("forward", False): (x, weight),
        ("forward", True): (x, x, weight),
        ("backward", False): (x, weight, x),
        ("backward", True): (x, weight, x, x),
    }[op, case.residual]
    results = {("forward", False): (x,), ("forward", True): (x, x)}.get((op, case.residual), (x, weight))
    static: dict[str, Any] = {"eps": EPS, "zero_centered": case.zero_centered, "float32_scale": case.float32_scale}
    if impl == "ours":
        fn = getattr(load_jax_module("rms-norm", "kernel"), _function(op, case.residual, "rms_norm_forward"))
        if blocks:
            static["config"] = load_jax_module("rms-norm", "config").Config(**blocks)
    else:
        fn = getattr(load_jax_module("rms-norm", "reference"), _function(op, case.residual, "rms_norm"))
    least = sum(math.prod(array.shape) * array.dtype.itemsize for array in (*args, *results))
    return Program(functools.partial(fn, **static), args, least_bytes=least)


def own_blocks(op: str, case_name: str, target: str) -> dict[str, int]:
    """What the kernel chooses by itself on that TPU."""
    case, tuned = find_case(case_name), load_jax_module("rms-norm", "tuned")
    kind = HARDWARE[target].device_kind
    config = tuned.tuned_config(
        op, case.m, case.n, _streams(op, case, target), case.dtype, residual=case.residual, device_kind=kind
    )
    return vars(config).copy()


def default_blocks(op: str, case_name: str, target: str) -> dict[str, int]:
    """The same without what was tuned."""
    case, config = find_case(case_name), load_jax_module("rms-norm", "config")
    return vars(config.choose(case.m, case.n, _streams(op, case, target))).copy()


def peer_blocks(op: str, case_name: str, target: str, impl: str) -> list[dict[str, int] | None]:
    return [None]  # XLA chooses by itself


def tune_blocks(op: str, case_name: str, target: str) -> list[dict[str, int]]:
    """Rows per step around the default, halved and doubled, and rows per tile likewise, where they fit VMEM."""
    case, config = find_case(case_name), load_jax_module("rms-norm", "config")
    default = config.choose(case.m, case.n, _streams(op, case, target))
    if default.block_n < case.n:
        return []  # rows are cut: there is one way to do it
    found = []
    for tile_m in sorted({default.tile_m * f // 2 for f in (1, 2, 4)}):
        for factor in (0.25, 0.5, 1, 2, 4):
            block_m = int(default.block_m * factor) // max(tile_m, 1) * tile_m
            if not 1 <= tile_m <= block_m <= case.m or (tile_m % 8 and tile_m != case.m):
                continue
            candidate = config.Config(block_m, default.block_n, tile_m, default.vmem_limit_bytes)
            if config.vmem_bytes(candidate, case.n, _streams(op, case, target)) <= candidate.vmem_limit_bytes * 7 // 8:
                found.append(vars(candidate).copy())
    return found


def sizes(op: str, case_name: str) -> dict[str, Any]:
    """What a tuned entry is found by."""
    case = find_case(case_name)
    return load_jax_module("rms-norm", "tuned").sizes(op, case.m, case.n, case.dtype, case.residual)


def find_case(name: str) -> Any:
    """The case of that name, or of that shape.

    Raises   ValueError: there is none.
    """
    if is_shape(name):
        return shape_case(name)
    cases = load_jax_module("rms-norm", "cases").CASES
    found = next((case for case in cases if case.name == name), None)
    if found is None:
        raise ValueError(f"rms-norm has no workload {name!r}; there are: {', '.join(case.name for case in cases)}.")
    return found


def shape_case(text: str) -> Any:
    """A case of the user's own. Raises   ValueError: not in the letters of this kernel."""
    flags = ("residual", "zero_centered", "float32_scale")
    shape, given = parse_shape("rms-norm", text, {"m": 4096, "n": 5120}, (*flags, "float32"))
    dtype = "float32" if "float32" in given else "bfloat16"
    case = load_jax_module("rms-norm", "cases").Case
    return case(text, **shape, dtype=dtype, **{flag: flag in given for flag in flags})


def tuned_workload(when: dict[str, Any]) -> Workload:
    """The workload that such an entry was made for."""
    words = [f"m={when['m']}", f"n={when['n']}"]
    words += ["residual"] * when["residual"] + ["float32"] * (when["dtype"] == "float32")
    return Workload(when["op"], ",".join(words))


def _streams(op: str, case: Any, target: str) -> Any:
    config, item = load_jax_module("rms-norm", "config"), 2 if case.dtype == "bfloat16" else 4
    if op == "forward":
        return config.forward_streams(item, item, residual=case.residual)
    return config.backward_streams(item, item, residual=case.residual, device_kind=HARDWARE[target].device_kind)


def _function(op: str, residual: bool, forward: str) -> str:
    if op == "forward":
        return forward.replace("rms_norm", "rms_norm_residual") if residual else forward
    return "rms_norm_residual_backward" if residual else "rms_norm_backward"
