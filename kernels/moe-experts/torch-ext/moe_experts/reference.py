"""What an experts layer is: every expert on every token, in float32, weighted. Tests and benchmarks use it.

A slot whose index is not 0 ... e - 1 adds nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .gates import Gating


def moe_experts(
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
) -> jax.Array:
    """(t, h), (e, w, h), (e, h, i), (t, top_k), (t, top_k), (e, w), (e, h) -> (t, h); see op.py."""
    x, experts = hidden_states.astype(jnp.float32), gate_up_proj.shape[0]
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
