"""A whole layer of experts as one call: which variant runs, and what all of them take for granted.

    out[t] = sum over k of  weights[t, k] * down[e] @ gated(gate_up[e] @ x[t] + bias) + bias,   e = index[t, k]

    decode.py    few tokens: nothing is sorted or gathered, every expert in use reads all tokens
    prefill.py   many tokens: rows are gathered and summed inside VMEM, where tokens and an expert's weights fit in it
    products.py  any sizes: sort and gather, two ragged dots (the kernel of ragged-dot), combine

Quantised weights (stored.py) leave HBM as they are stored in the first two; products.py gets them dequantised by XLA,
all of them, which costs more than weights that never were quantised.

Shapes   x (t, h), gate_up (e, w, h), down (e, h, i), index and weights (t, top_k) -> (t, h); w is 2 * i, or i without a
         gate; the last two axes of the weights are exchanged when transposed, as quantised ones always are
Dtypes   float32 and bfloat16, summed in float32; what lies between the products is rounded to x.dtype once
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from ._bridge.tuning import device_kind
from .config import Config, DecodeConfig, PrefillConfig, ProductsConfig, Sizes, choose
from .decode import decode
from .gates import Gating
from .prefill import prefill
from .products import by_products
from .quantized_blocks import dequantize, for_device
from .stored import stored_as

UNROLLED_CALLS = 4  # more are a loop, so that code does not grow with the tokens


def moe_experts_forward(
    hidden_states: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    activation: str = "silu",
    gate: str = "concatenated",
    limit: float | None = None,
    transposed: bool = False,
    *,
    config: Config | None = None,
    interpret=False,
) -> jax.Array:
    """See op.py, where the arguments were checked. Both biases are given, or none."""
    (t, h), (e, *inner), top_k = hidden_states.shape, gate_up_proj.shape, top_k_index.shape[1]
    w = inner[1 if transposed else 0]
    i = w if gate == "none" else w // 2
    if 0 in (t, h, e, top_k):
        return jnp.zeros((t, h), hidden_states.dtype)
    scales = () if gate_up_scale is None or down_scale is None else (gate_up_scale, down_scale)
    stored = tuple(
        stored_as(data.dtype, scale.shape, *shape)
        for data, scale, shape in zip((gate_up_proj, down_proj), scales, ((h, w), (i, h)), strict=False)
    )
    sizes = Sizes(t, h, w, i, e, top_k, transposed, stored)
    index = top_k_index.astype(jnp.int32)
    both = gate_up_bias is not None and down_bias is not None
    biases = (gate_up_bias[:, None, :], down_bias[:, None, :]) if both else ()
    experts = (gate_up_proj, down_proj)
    weights = top_k_weights.astype(jnp.float32)
    common = {"gating": Gating(activation, gate, limit), "interpret": interpret}
    config = config or choose(sizes, hidden_states.dtype.itemsize, device_kind())
    if scales and isinstance(config, ProductsConfig):
        gate_up_scale, down_scale = scales
        experts = (
            dequantize(gate_up_proj, gate_up_scale, h, hidden_states.dtype),
            dequantize(down_proj, down_scale, i, hidden_states.dtype),
        )
    sizes = replace(sizes, stored=tuple(for_device(kept, device_kind()) for kept in stored))
    if isinstance(config, DecodeConfig):
        return decode(hidden_states, *experts, index, weights, biases, scales, sizes=sizes, config=config, **common)
    index = jnp.where((index >= 0) & (index < e), index, e)
    if isinstance(config, PrefillConfig):
        run = functools.partial(prefill, config=config, sizes=replace(sizes, t=config.tokens), **common)
        return _in_calls(
            lambda x, index, weights: run(x, *experts, index, weights, biases, scales),
            config.tokens,
            (hidden_states, *_merge_choices(index, weights, e)),
            fill=(0, e, 0),
        )
    return by_products(hidden_states, *experts, index, weights, biases, sizes=sizes, **common)


def _merge_choices(index, weights, e: int):
    """A token that chose an expert twice gets the sum of both weights at the first, and no expert at the second."""
    same = index[:, :, None] == index[:, None, :]  # (t, top_k, top_k)
    place = jnp.arange(index.shape[1])
    repeated = jnp.any(same & (place[:, None] > place), axis=2)
    total = jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=2)
    return jnp.where(repeated, e, index), total


def _in_calls(call, tokens: int, arrays, fill):
    """call(*rows of arrays) for `tokens` rows at a time, the last filled up; results in one array."""
    t = arrays[0].shape[0]
    calls = -(-t // tokens)
    if calls == 1 and t == tokens:
        return call(*arrays)
    padded = [
        jnp.pad(array, ((0, calls * tokens - t), (0, 0)), constant_values=value).reshape(calls, tokens, -1)
        for array, value in zip(arrays, fill, strict=True)
    ]
    if calls <= UNROLLED_CALLS:
        results = jnp.zeros((calls * tokens, arrays[0].shape[1]), arrays[0].dtype)
        for n in range(calls):
            result = call(*(array[n] for array in padded))
            results = jax.lax.dynamic_update_slice(results, result, (n * tokens, 0))
    else:
        results = jax.lax.map(lambda rows: call(*rows), tuple(padded)).reshape(calls * tokens, -1)
    return results[:t]
