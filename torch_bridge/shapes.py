"""Output shapes and dtypes of an op from its JAX function, also where sizes are symbols.

torch.compile and torch.export ask an op for the shape of its result with SymInts in the input shapes.
They become symbolic dimensions of jax.export, the JAX function is traced abstractly, and the sizes that
come out, say `2*d0 + 1`, are worked out again with SymInts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from . import lazy, symbols
from .cpu import run
from .dtypes import TO_TORCH, WIDE, jax_name, numpy_dtype
from .schema import Schema, key_of


class Shapes:
    def __init__(self, op: str, schema: Schema, fn: Callable | lazy.Lazy, wide: bool):
        self.op, self.schema, self.fn, self.wide = op, schema, fn, wide
        self._known: dict[Any, list] = {}

    def __call__(self, tensors: tuple, attributes: tuple) -> list[tuple[tuple, torch.dtype]]:
        """[(shape, dtype)] of the outputs."""
        dtypes = tuple(
            None if t is None else jax_name(t.dtype, self.op, a.name, self.wide)
            for t, a in zip(tensors, self.schema.tensors, strict=True)
        )
        shapes = tuple(None if t is None else tuple(t.shape) for t in tensors)
        if any(isinstance(size, torch.SymInt) for shape in shapes if shape is not None for size in shape):
            return symbols.infer(self._trace, shapes, dtypes, attributes, self._known, self.op)
        key = (shapes, dtypes, key_of(attributes))
        if key not in self._known:
            self._known[key] = self._trace(shapes, dtypes, attributes)
        return self._known[key]

    def _trace(self, shapes: tuple, dtypes: tuple, attributes: tuple) -> list[tuple[tuple, torch.dtype]]:
        jax = lazy.import_jax(self.op)
        fn = lazy.load(self.fn, self.op)
        keywords = dict(zip((a.name for a in self.schema.attributes), attributes, strict=True))
        # Only a torch path computes in 64-bit floats; then the shapes are traced with them too, here only.
        wide = any(name in WIDE.values() for name in dtypes)
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            arrays = [
                None if shape is None else jax.ShapeDtypeStruct(shape, numpy_dtype(dtype))
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            outputs = jax.eval_shape(lambda *arrays: run(fn, arrays, keywords, self.schema, self.op), *arrays)
        return [(tuple(output.shape), TO_TORCH[output.dtype.name]) for output in outputs]
