"""Blocks of a launch: those that were tuned for its sizes or for near ones (tuning/*.json), else config.py's choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ._bridge.tuning import look_up
from .config import LARGEST_VMEM_BYTES, SPARE_SHARE, Config, Streams, choose, vmem_bytes

FOLDER = Path(__file__).parent / "tuning"
LARGEST_TILE = 128  # rows; more than fit into registers are spilled to VMEM, which the estimate does not count


def tuned_config(
    op: str, m: int, n: int, streams: Streams, dtype: str, *, residual: bool, device_kind: str | None
) -> Config:
    """Blocks for x (m, n), never over the VMEM limit; `op` is forward or backward, `dtype` that of x.

    Raises   NoConfig: not even cut rows fit the largest limit
    """

    def adapt(config: Config, tuned: Any) -> Config | None:
        return fitted(config, tuned, m, n, streams)

    default = choose(m, n, streams)
    return look_up("rms-norm", FOLDER, device_kind, sizes(op, m, n, dtype, residual), default, adapt)


def sizes(op: str, m: int, n: int, dtype: str, residual: bool) -> dict[str, Any]:
    """What a tuned entry is found by."""
    return {"op": op, "residual": residual, "dtype": dtype, "m": m, "n": n}


def fitted(config: Config, tuned: Any, m: int, n: int, streams: Streams) -> Config | None:
    """`config`, found at the sizes `tuned`, for these sizes; None where it can't be launched or may not fit VMEM."""
    if config.block_n < tuned["n"]:
        return None  # rows that are cut into columns: there is one way to do it
    config = replace(config, block_n=n, block_m=min(config.block_m, m // config.tile_m * config.tile_m))
    launchable = (
        config.block_m >= 1
        and config.block_m % config.tile_m == 0
        and (config.tile_m % 8 == 0 or config.tile_m == m)
        and config.tile_m <= LARGEST_TILE
        and config.vmem_limit_bytes <= LARGEST_VMEM_BYTES
    )
    budget = config.vmem_limit_bytes - config.vmem_limit_bytes // SPARE_SHARE  # as config.py leaves to the compiler
    return config if launchable and vmem_bytes(config, n, streams) <= budget else None
