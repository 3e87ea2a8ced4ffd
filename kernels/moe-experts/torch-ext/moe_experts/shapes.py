"""The results' shapes as JAX functions for symbolic sizes; sizes were compared before."""

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
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    activation: str = "silu",
    gate: str = "concatenated",
    limit: float | None = None,
    transposed: bool = False,
) -> jax.Array:
    return jnp.zeros(hidden_states.shape, hidden_states.dtype)


def quantized_dot(
    lhs: jax.Array, data: jax.Array, scale: jax.Array, group_sizes: jax.Array, k: int, transpose: bool = False
) -> jax.Array:
    return jnp.zeros((lhs.shape[0], k if transpose else data.shape[2]), lhs.dtype)


def router_topk(
    logits: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 2,
    epsilon: float = 1e-20,
) -> tuple[jax.Array, jax.Array]:
    shape = (logits.shape[0], top_k)
    return jnp.zeros(shape, logits.dtype), jnp.zeros(shape, jnp.int32)
