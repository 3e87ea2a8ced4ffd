"""The programs of this project's kernels: every public op, forward and backward, on the workloads of `cases.py`.

A program is named by a small dict that goes to the worker as JSON:

    kernel   folder name
    op       what is computed; each module below lists its own
    case     name of a workload, or a shape such as "m=4096,n=5120"
    impl     "ours", or the peer: jax, tokamax, xla, ...
    blocks   block sizes by name; None: whatever the implementation chooses
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

# Kernel -> module with OPS, PEERS, cases(), shape_case(), build(), own_blocks() (what the kernel takes by itself),
# peer_blocks(); where
# blocks are tuned also default_blocks() (without tuning), tune_blocks() and sizes() (how the kernel looks blocks up).
_MODULES = {
    "rms-norm": "of_rms_norm",
    "ragged-dot": "of_ragged_dot",
    "moe-experts": "of_moe_experts",
    "router": "of_router",
    "paged-attention": "of_paged_attention",
    "flash-attention": "of_flash_attention",
}
_PEERS_OF = {
    "tokamax-ragged-dot": "`pallas-hub aot ragged-dot --vs tokamax` reports on alone, and `pallas-hub aot moe-experts "
    "--vs tokamax` in a whole experts layer",
}
_FOLDERS = {"paged-attention": "flash-attention", "router": "moe-experts"}  # of those that are a part of another kernel


@dataclass(frozen=True)
class Program:
    """A call to compile. Arguments are shapes, or arrays where the traffic depends on their values."""

    fn: Callable
    args: tuple[Any, ...]
    least_bytes: int
    flops: int = 0
    options: dict[str, str | bool] = field(default_factory=dict)
    # Another call with the same traffic, for a kernel that makes its copies by itself and so can't be counted.
    counted_as: tuple[Callable, tuple[Any, ...]] | None = None
    note: str = ""
    counted_note: str = "bytes counted for megablox at the same tile"  # said where counted_as is given


@dataclass(frozen=True)
class Workload:
    """One op on one case."""

    op: str
    case: str


def kernel_programs(kernel: str) -> ModuleType:
    """The module that builds the programs of `kernel`.

    Raises   ValueError: there are none for it; the message lists the kernels that have some.
    """
    if kernel in _PEERS_OF:
        raise ValueError(f"{kernel} is a peer, which {_PEERS_OF[kernel]}.")
    if kernel not in _MODULES:
        raise ValueError(f"no compile report for kernel {kernel!r}; there are reports for: {', '.join(_MODULES)}.")
    return importlib.import_module(f"pallas_hub.bench.aot.{_MODULES[kernel]}")


def folder_of(kernel: str) -> str:
    """The folder in kernels/ that holds its code."""
    return _FOLDERS.get(kernel, kernel)


def find_program(name: dict[str, Any]) -> Program:
    """The program that such a dict names."""
    return kernel_programs(name["kernel"]).build(name["op"], name["case"], name["impl"], name["blocks"])
