"""What a ragged dot is: one masked product per group, in float32. Tests, benchmarks and shape rules use these two.

Rows belong to groups in order: the first group_sizes[0] rows to group 0, and so on. Negative sizes count as 0, and rows
that the sizes ask for past the end of lhs do not exist. Every size may be symbolic (jax.export).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, transpose_rhs: bool = False) -> jax.Array:
    """(m, k), (g, k, n) or (g, n, k), (g,) -> (m, n) in lhs.dtype; rows that belong to no group are zero."""
    m, n = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    lhs32 = lhs.astype(jnp.float32)

    def add_group(out, group):
        weight, in_group = group  # (k, n) or (n, k), (m,)
        weight = weight.astype(jnp.float32)
        product = jnp.matmul(lhs32, weight.T if transpose_rhs else weight, precision="highest")
        return jnp.where(in_group[:, None], product, out), None

    out, _ = jax.lax.scan(add_group, jnp.zeros((m, n), jnp.float32), (rhs, _rows_in_group(group_sizes, m)))
    return out.astype(lhs.dtype)


def ragged_dot_weight_gradient(
    lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, transpose: bool = False
) -> jax.Array:
    """(m, k), (m, n), (g,) -> (g, k, n) in lhs.dtype, or (g, n, k) when transposed; zero for a group without rows."""
    lhs32, grad32 = lhs.astype(jnp.float32), grad.astype(jnp.float32)

    def one_group(in_group):  # rows of other groups may hold NaN, so both factors are cleared
        left, right = jnp.where(in_group[:, None], lhs32, 0), jnp.where(in_group[:, None], grad32, 0)
        if transpose:
            left, right = right, left
        return jnp.matmul(left.T, right, precision="highest").astype(lhs.dtype)

    return jax.lax.map(one_group, _rows_in_group(group_sizes, lhs.shape[0]))


def _rows_in_group(group_sizes, m):
    """(g,) -> (g, m) bool: does row i belong to group e?"""
    ends = jnp.cumsum(jnp.clip(group_sizes.astype(jnp.int32), 0, m))[:, None]  # (g, 1)
    starts = jnp.concatenate([jnp.zeros((1, 1), jnp.int32), ends])[:-1]
    row = jnp.arange(m, dtype=jnp.int32)
    return (row >= starts) & (row < ends)
