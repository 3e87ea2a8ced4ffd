"""The results' shapes as JAX functions for symbolic sizes; sizes were compared before."""

from __future__ import annotations

import jax
import jax.numpy as jnp

NOT_ASKED_FOR = (0,)  # the shape of a gradient that nobody asked for


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    bias: jax.Array | None = None,
    slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    diag: jax.Array | None = None,
    *,
    scale: float,
    softcap: float,
) -> tuple[jax.Array, jax.Array]:
    b, lq, hq, _ = q.shape
    return jnp.zeros((b, lq, hq, v.shape[3]), q.dtype), jnp.zeros((b, hq, lq), statistics_dtype(q))


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    bias: jax.Array | None,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
    diag: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    scale: float,
    softcap: float,
    needs_bias: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv, dbias, dsinks."""
    dbias = jnp.zeros_like(bias) if bias is not None and needs_bias else jnp.zeros(NOT_ASKED_FOR, q.dtype)
    dsinks = jnp.zeros_like(sinks) if sinks is not None else jnp.zeros(NOT_ASKED_FOR, q.dtype)
    return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v), dbias, dsinks


def statistics_dtype(q: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
