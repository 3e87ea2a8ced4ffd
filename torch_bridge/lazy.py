"""A reference to a function that is imported on first use."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from .state import jax_has_started

log = logging.getLogger(__name__)


class Lazy:
    """`Lazy(".kernel:rms_norm", __package__)` names a function without importing its module.

    Kernel modules import JAX at their top. A `Lazy` lets the package that declares an op be
    imported, and its torch path be used, on a machine without JAX.
    """

    def __init__(self, target: str, package: str | None = None):
        module, separator, name = target.partition(":")
        if not (separator and module and name):
            raise ValueError(f'Lazy: target must be "module:function"; got "{target}".')
        self.module, self.name, self.package = module, name, package
        self._function: Callable | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    def load(self) -> Callable:
        if self._function is None:
            module = importlib.import_module(self.module, self.package)
            self._function = getattr(module, self.name)
        return self._function

    def __repr__(self) -> str:
        return f'Lazy("{self.module}:{self.name}")'


def load(function: Callable | Lazy, op: str) -> Callable:
    """The function itself; if importing it fails for want of JAX, say which op needed JAX."""
    if not isinstance(function, Lazy):
        return function
    try:
        return function.load()
    except ImportError as error:
        if is_jax(error):
            raise missing_jax(op, error) from error
        raise


def import_jax(op: str) -> Any:
    """JAX, as the bridge uses it in every path."""
    try:
        import jax
    except ImportError as error:
        if is_jax(error):
            raise missing_jax(op, error) from error
        raise
    _leave_the_tpu_to_torch(jax)
    return jax


def _leave_the_tpu_to_torch(jax: Any) -> None:
    """Where torch_tpu owns the TPU, JAX only traces for it and computes on the CPU.

    A chip can be opened once, and JAX, unless told otherwise, would open it to look for devices.
    """
    if hasattr(torch, "tpu") and not jax.config.jax_platforms and not jax_has_started():
        log.info('torch_tpu is loaded: JAX is set to jax_platforms="cpu" (set JAX_PLATFORMS to choose otherwise)')
        jax.config.update("jax_platforms", "cpu")


def is_jax(error: ImportError) -> bool:
    return (error.name or "").partition(".")[0] in ("jax", "jaxlib")


def missing_jax(op: str, error: ImportError) -> ImportError:
    return ImportError(
        f"{op}: this path runs JAX code, and JAX can't be imported ({error}). Install it: pip install jax",
        name=error.name,
    )
