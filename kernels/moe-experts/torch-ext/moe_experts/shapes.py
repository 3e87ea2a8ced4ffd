"""The result's shape as a JAX function for symbolic sizes; op.py has compared the sizes by then."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
    return jnp.zeros(hidden_states.shape, hidden_states.dtype)
