"""The ragged dot with quantised weights on TPU: XLA makes all of them floats, then ragged-dot's kernel multiplies.

For what the fused layer does not do: gradients, float16, a function for the gate. It saves no bytes of HBM traffic.
"""

from __future__ import annotations

import jax

from ._ragged_dot.kernel import ragged_dot_forward
from .quantized_blocks import dequantize


def quantized_dot(
    lhs: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    group_sizes: jax.Array,
    k: int,
    transpose: bool = False,
    *,
    interpret=False,
) -> jax.Array:
    """(m, k) -> (m, n), or with the weights transposed (m, n) -> (m, k). See quantized_dot.py."""
    return ragged_dot_forward(lhs, dequantize(data, scale, k, lhs.dtype), group_sizes, transpose, interpret=interpret)
