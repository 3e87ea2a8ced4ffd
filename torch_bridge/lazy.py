"""A reference to a function that is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


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
        raise missing_jax(op, error) if is_jax(error) else error from error


def import_jax(op: str) -> Any:
    try:
        import jax
    except ImportError as error:
        raise missing_jax(op, error) if is_jax(error) else error from error
    return jax


def is_jax(error: ImportError) -> bool:
    return (error.name or "").partition(".")[0] in ("jax", "jaxlib")


def missing_jax(op: str, error: ImportError) -> ImportError:
    return ImportError(
        f"{op}: this path runs JAX code, and JAX can't be imported ({error}). Install it: pip install jax",
        name=error.name,
    )
