"""The kernel, and modules inside it, as fixtures."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def rms_norm_kernel() -> ModuleType:
    return importlib.import_module("rms_norm")


@pytest.fixture(scope="session")
def part():
    """`part("config")`: a module inside the kernel."""
    return lambda name: importlib.import_module(f"rms_norm.{name}")
