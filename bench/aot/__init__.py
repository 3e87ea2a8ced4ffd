"""Compile kernels for real TPUs on a machine without one, and report what the compiler made of them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KernelReport", "Report", "compile_report"]


def __getattr__(name: str) -> Any:
    """Imported on first use: the worker process needs neither the report nor what it imports."""
    if name in __all__:
        return getattr(importlib.import_module("pallas_hub.bench.aot.report"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
