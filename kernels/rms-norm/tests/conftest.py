"""How the tests of this kernel get it: as the one module a user receives."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

TORCH_EXT = Path(__file__).parents[1] / "torch-ext"


def kernel() -> ModuleType:
    if str(TORCH_EXT) not in sys.path:
        sys.path.insert(0, str(TORCH_EXT))
    return importlib.import_module("rms_norm")


@pytest.fixture(scope="session")
def rms_norm_kernel() -> ModuleType:
    return kernel()


@pytest.fixture(scope="session")
def part(rms_norm_kernel):
    """`part("config")`: a module inside the kernel."""
    return lambda name: importlib.import_module(f"{rms_norm_kernel.__name__}.{name}")
