"""A gradient that is itself a JAX function: it becomes the op <name>_backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import lazy
from .lazy import Lazy
from .schema import Argument, Schema


def set_vjp(op: Any, vjp: Callable | Lazy) -> None:
    """Let `op` go back through `vjp`. What is not asked for is cut out of the traced program."""
    from .op import JaxOp

    schema = op.schema
    grads = tuple(Argument(f"grad_{i}", "Tensor", False) for i in range(schema.n_outputs))
    tensors = tuple(Argument(a.name, a.type, a.optional) for a in schema.tensors)
    attributes = tuple(Argument(a.name, a.type, a.optional) for a in schema.attributes)
    backward_schema = Schema(
        tensors=tensors + grads,
        attributes=(*attributes, Argument("needs", "int", False)),  # bit i: the gradient of input i
        n_outputs=len(tensors),
        returns_tuple=len(tensors) > 1,
    )
    name = f"{op.name}_backward"
    backward = JaxOp(name, op.namespace, backward_schema, _Backward(vjp, name, len(tensors)))
    names = [argument.name for argument in schema.tensors]

    def rule(saved: Any, needs: Any, *output_grads: torch.Tensor) -> tuple:
        mask = sum(getattr(needs, name) << i for i, name in enumerate(names))
        inputs = [getattr(saved, name) for name in names]
        values = [getattr(saved, argument.name) for argument in attributes]
        results = backward(*inputs, *output_grads, *values, mask)
        results = results if len(names) > 1 else (results,)
        return tuple(r if getattr(needs, name) else None for name, r in zip(names, results, strict=True))

    op.set_backward(rule)
    op.backward_op = backward


class _Backward(Lazy):
    """The JAX code of a backward op, made when `vjp` is first imported."""

    def __init__(self, vjp: Callable | Lazy, op: str, n_inputs: int):
        self._vjp, self._op, self._n_inputs = vjp, op, n_inputs
        self._function = None

    def load(self) -> Callable:
        if self._function is None:
            self._function = self._make(lazy.load(self._vjp, self._op))
        return self._function

    def _make(self, vjp: Callable) -> Callable:
        op, n = self._op, self._n_inputs

        def backward(*arrays: Any, needs: int, **keywords: Any) -> tuple:
            inputs, output_grads = arrays[:n], map(_cotangent, arrays[n:])
            grads = vjp(*inputs, *output_grads, **keywords)
            grads = tuple(grads) if isinstance(grads, tuple | list) else (grads,)
            if len(grads) != n:
                raise TypeError(f"{op}: vjp must return one entry per tensor input, {n}; got {len(grads)}.")
            entries = tuple(_entry(needs >> i & 1, grads[i], inputs[i], i, op) for i in range(n))
            return entries if n > 1 else entries[0]

        if "interpret" in inspect.signature(vjp).parameters:
            # Tells the bridge that this is a Pallas kernel.
            def pallas_backward(*arrays: Any, needs: int, interpret: Any = False, **keywords: Any) -> tuple:
                return backward(*arrays, needs=needs, interpret=interpret, **keywords)

            return pallas_backward
        return backward

    def __repr__(self) -> str:
        return f"<backward of {self._op}>"


def _cotangent(grad: Any) -> Any:
    """torch's gradient of an output as JAX has it: conjugate, and of dtype float0 for an integer output."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if jnp.issubdtype(grad.dtype, jnp.inexact):
        return jnp.conj(grad)
    return np.zeros(grad.shape, jax.dtypes.float0)


def _entry(needed: int, grad: Any, x: Any, i: int, op: str) -> Any:
    """The gradient as torch has it, in the dtype of its input; an empty array for one that nobody asked for."""
    import jax.numpy as jnp

    if not needed:
        return jnp.zeros((0,), jnp.float32)
    if grad is None:
        return jnp.zeros_like(x)
    if grad.shape != x.shape:
        raise ValueError(f"{op}: entry {i} of vjp must have the shape of its input, {x.shape}; got {grad.shape}.")
    return jnp.conj(grad).astype(x.dtype)
