"""A whole layer of experts as one call: which variant runs, and what all of them take for granted.

    out[t] = sum over k of  weights[t, k] * down[e] @ gated(gate_up[e] @ x[t] + bias) + bias,   e = index[t, k]

    decode.py    few tokens: nothing is sorted or gathered, every expert in use reads all tokens
    products.py  any sizes: sort and gather, two ragged dots (the kernel of ragged-dot), combine

Shapes   x (t, h), gate_up (e, w, h), down (e, h, i), index and weights (t, top_k) -> (t, h); w is 2 * i, or i without a
         gate; the last two axes of the weights are exchanged when transposed
Dtypes   float32 and bfloat16, summed in float32; what lies between the products is rounded to x.dtype once
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .config import DecodeConfig, Sizes, choose
from .decode import decode
from .gates import Gating
from .products import by_products


def moe_experts_forward(
    hidden_states: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: str = "silu",
    gate: str = "concatenated",
    limit: float | None = None,
    transposed: bool = False,
    *,
    config: DecodeConfig | None = None,
    interpret=False,
) -> jax.Array:
    """See op.py, where the arguments were checked. Both biases are given, or none."""
    (t, h), (e, *inner), top_k = hidden_states.shape, gate_up_proj.shape, top_k_index.shape[1]
    w, i = inner[1 if transposed else 0], down_proj.shape[1 if transposed else 2]
    if 0 in (t, h, e, top_k):
        return jnp.zeros((t, h), hidden_states.dtype)
    sizes = Sizes(t, h, w, i, e, top_k, transposed)
    index = top_k_index.astype(jnp.int32)
    index = jnp.where((index >= 0) & (index < e), index, e)
    biases = () if gate_up_bias is None else (gate_up_bias[:, None, :], down_bias[:, None, :])
    arguments = (hidden_states, gate_up_proj, down_proj, index, top_k_weights.astype(jnp.float32), biases)
    gating = Gating(activation, gate, limit)
    config = config or choose(sizes, hidden_states.dtype.itemsize)
    if config is None:
        return by_products(*arguments, sizes=sizes, gating=gating, interpret=interpret)
    return decode(*arguments, sizes=sizes, gating=gating, config=config, interpret=interpret)
