"""Which dtypes cross between torch and JAX, and as what.

JAX computes in at most 32 bits unless a process-wide switch is thrown, which a library must not do.
So int64 crosses as int32 once its values were checked to fit, and float64 is refused, in words.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

# numpy knows these itself.
SAME = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint32: "uint32",
    torch.uint16: "uint16",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
}
# numpy knows these through ml_dtypes; the bits cross as an integer of the same width.
AS_BITS = {
    torch.bfloat16: ("bfloat16", torch.int16),
    torch.float8_e4m3fn: ("float8_e4m3fn", torch.uint8),
    torch.float8_e4m3fnuz: ("float8_e4m3fnuz", torch.uint8),
    torch.float8_e5m2: ("float8_e5m2", torch.uint8),
    torch.float8_e5m2fnuz: ("float8_e5m2fnuz", torch.uint8),
}
NAMES = SAME | {dtype: name for dtype, (name, _) in AS_BITS.items()}
WIDE = {torch.float64: "float64", torch.complex128: "complex128"}
TO_TORCH = {name: dtype for dtype, name in (NAMES | WIDE).items()} | {"int64": torch.int64}

MEND = {torch.float64: "Try .to(torch.float32).", torch.complex128: "Try .to(torch.complex64)."}


def jax_name(dtype: torch.dtype, op: str, argument: str, wide: bool = False) -> str:
    """Name of the dtype that `argument` has on the JAX side. `wide` lets 64-bit floats through."""
    if dtype is torch.int64:
        return "int32"
    name = NAMES.get(dtype) or (WIDE.get(dtype) if wide else None)
    if name is None:
        raise unsupported(dtype, op, argument)
    return name


def unsupported(dtype: torch.dtype, op: str, argument: str) -> TypeError:
    supported = ", ".join(NAMES.values())
    return TypeError(
        f"{op}: {argument} is {str(dtype).removeprefix('torch.')}; JAX code takes {supported}, "
        f"and int64 whose values fit int32. {MEND.get(dtype, '')}".rstrip()
    )


@functools.cache
def numpy_dtype(name: str) -> Any:
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))
