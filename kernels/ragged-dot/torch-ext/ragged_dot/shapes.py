"""The results' shapes as JAX functions for symbolic sizes.

The reference would do, if torch and JAX agreed on when two symbolic sizes are equal: they don't for the inner size of
the second product, which torch knows as (2 * i + 1) // 2 after a chunk. op.py has compared the sizes by then.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, transpose_rhs: bool = False) -> jax.Array:
    return jnp.zeros((lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]), lhs.dtype)


def ragged_dot_weight_gradient(
    lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, transpose: bool = False
) -> jax.Array:
    left, right = (grad, lhs) if transpose else (lhs, grad)
    return jnp.zeros((group_sizes.shape[0], left.shape[1], right.shape[1]), lhs.dtype)
