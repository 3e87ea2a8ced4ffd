"""CPU tensors to JAX and back without copying, at a few microseconds per call.

In: a numpy view of the tensor goes straight into jit's C++ fast path, which is about ten times cheaper
than building a jax.Array first (`jax.dlpack.from_dlpack`, `jax.device_put`).
Out: the result's buffer is described to numpy by `__array_interface__`. The tensor keeps the jax.Array
alive, and may be written to, because `fresh` makes sure that nobody else can see that buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy import asarray as as_numpy

from .dtypes import AS_BITS, SAME, TO_TORCH, numpy_dtype, unsupported

INT32 = torch.iinfo(torch.int32)


def to_numpy(tensor: torch.Tensor, op: str, argument: str) -> Any:
    """A view of the tensor's memory; a copy only if it is not row-major, or int64."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {argument} has layout {tensor.layout}; give a dense tensor. Try .to_dense().")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    dtype = tensor.dtype
    if dtype in SAME:
        try:
            return tensor.numpy()
        except RuntimeError:  # conjugation or a sign is still to be applied
            return tensor.resolve_conj().resolve_neg().numpy()
    if dtype in AS_BITS:
        name, bits = AS_BITS[dtype]
        return tensor.view(bits).numpy().view(numpy_dtype(name))
    if dtype is torch.int64:
        return _as_int32(tensor, op, argument).numpy()
    raise unsupported(dtype, op, argument)


def _as_int32(tensor: torch.Tensor, op: str, argument: str) -> torch.Tensor:
    if tensor.numel():
        low, high = (bound.item() for bound in tensor.aminmax())
        if low < INT32.min or high > INT32.max:
            raise OverflowError(
                f"{op}: {argument} is int64 and crosses to JAX as int32, so its values must lie in "
                f"[{INT32.min}, {INT32.max}]; got [{low}, {high}]."
            )
    return tensor.to(torch.int32)


class _Buffer:
    """Lends the memory of a jax.Array, and keeps the array alive for as long as it is lent."""

    __slots__ = ("__array_interface__", "array")

    def __init__(self, array: Any, shape: tuple, typestr: str):
        self.array = array
        pointer = array.unsafe_buffer_pointer()
        self.__array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": typestr, "version": 3}


# JAX dtype -> (numpy typestr of the same width, torch dtype to view the bits as, if another)
_OUT: dict[Any, tuple[str, torch.dtype | None]] = {}


def to_torch(array: Any) -> torch.Tensor:
    """A tensor over the memory of a ready jax.Array that nobody else holds."""
    dtype, shape = array.dtype, array.shape
    known = _OUT.get(dtype)
    if known is None:
        known = _OUT[dtype] = _describe(dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=TO_TORCH[dtype.name])
    typestr, view = known
    tensor = torch.from_numpy(as_numpy(_Buffer(array, shape, typestr)))
    return tensor if view is None else tensor.view(view)


def _describe(dtype: Any) -> tuple[str, torch.dtype | None]:
    import numpy as np

    if dtype.name not in TO_TORCH:
        raise TypeError(f"JAX returned {dtype.name}, which torch has no dtype for.")
    ours = TO_TORCH[dtype.name]
    if ours in AS_BITS:
        return np.dtype(f"i{dtype.itemsize}" if dtype.itemsize > 1 else "u1").str, ours
    return np.dtype(dtype).str, None


def fresh(outputs: list, inputs: tuple) -> list:
    """Outputs that share no memory with an input, a constant or each other.

    jit hands an input that is returned as it is, a closed-over array, or the same value twice back
    without a copy. In JAX that can't be seen; a torch user may write into the result.
    """
    import jax
    import jax.numpy as jnp

    taken = {id(x) for x in inputs}
    result = []
    for output in outputs:
        if not isinstance(output, jax.core.Tracer) or id(output) in taken:
            output = jnp.array(output, copy=True)
        taken.add(id(output))
        result.append(output)
    return result
