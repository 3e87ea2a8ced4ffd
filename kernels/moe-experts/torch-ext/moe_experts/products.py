"""Any sizes: sort the slots by expert, gather their tokens, two ragged dots, combine; XLA does the rest."""

from __future__ import annotations

import jax.numpy as jnp

from ._ragged_dot.kernel import ragged_dot_forward
from .config import Sizes
from .gates import Gating
from .routing import sort_by_expert


def by_products(x, gate_up, down, index, weights, biases, *, sizes: Sizes, gating: Gating, interpret):
    """Arguments as in kernel.py, index int32 and weights float32; biases (e, 1, w) and (e, 1, h), or empty."""
    order, experts, group_sizes = sort_by_expert(index, sizes.e)
    served = (experts < sizes.e)[:, None]  # (s, 1): slots without an expert come last, and may hold anything

    def linear(x, weight, bias):
        y = ragged_dot_forward(x, weight, group_sizes, not sizes.transposed, interpret=interpret)
        return y if bias is None else y + bias[jnp.minimum(experts, sizes.e - 1), 0].astype(y.dtype)

    gate_up_bias, down_bias = biases or (None, None)
    product = linear(x[order // sizes.top_k], gate_up, gate_up_bias)  # (s, w)
    gated = gating.of(product.astype(jnp.float32)).astype(x.dtype)
    y = jnp.where(served, linear(gated, down, down_bias), 0)  # (s, h)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
    rows = y[back].reshape(sizes.t, sizes.top_k, sizes.h).astype(jnp.float32)
    weights = jnp.where(index < sizes.e, weights, 0.0)
    return jnp.sum(rows * weights[:, :, None], axis=1).astype(x.dtype)
