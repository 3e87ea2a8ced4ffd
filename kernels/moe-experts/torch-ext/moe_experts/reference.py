"""What an experts layer is: every expert on every token, in float32, weighted. Tests and benchmarks use it.

A slot whose index is not 0 ... e - 1 adds nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .gates import Gating
from .quantized_blocks import dequantize


def moe_experts(
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
) -> jax.Array:
    """(t, h), (e, w, h), (e, h, i), (t, top_k), (t, top_k), (e, w), (e, h) -> (t, h); see op.py and stored.py."""
    x, experts, h = hidden_states.astype(jnp.float32), gate_up_proj.shape[0], hidden_states.shape[1]
    if gate_up_scale is not None and down_scale is not None:
        w = gate_up_proj.shape[2]
        gate_up_proj = dequantize(gate_up_proj, gate_up_scale, h, jnp.float32)
        down_proj = dequantize(down_proj, down_scale, w if gate == "none" else w // 2, jnp.float32)
    gating = Gating(activation, gate, limit)

    def linear(x, weight, bias):
        weight = weight.astype(jnp.float32)
        y = jnp.matmul(x, weight if transposed else weight.T, precision="highest")
        return y if bias is None else y + bias.astype(jnp.float32)

    def add_expert(out, expert):
        number, gate_up, down, gate_up_b, down_b = expert
        product = linear(x, gate_up, gate_up_b)
        y = linear(gating.of(product), down, down_b)
        served = top_k_index == number  # (t, top_k)
        weight = jnp.sum(jnp.where(served, top_k_weights.astype(jnp.float32), 0), axis=1, keepdims=True)
        return out + jnp.where(jnp.any(served, axis=1, keepdims=True), weight * y, 0), None

    everyone = (jnp.arange(experts), gate_up_proj, down_proj, gate_up_bias, down_bias)
    out, _ = jax.lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), everyone)
    return out.astype(hidden_states.dtype)
