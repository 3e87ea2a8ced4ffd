"""kernel.py as the ops call it: arrays first, then attributes, and every result an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import kernel
from .shapes import NOT_ASKED_FOR


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    bias: jax.Array | None,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
    diag: jax.Array | None,
    *,
    scale: float,
    softcap: float,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    bias = _within_reach(bias)
    return kernel.attention_forward(q, k, v, lo, hi, bias, slopes, sinks, scale, softcap, diag, interpret=interpret)


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
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv, dbias, dsinks."""
    bias = _within_reach(bias)
    inputs = (q, k, v, lo, hi, bias, slopes, sinks, out, lse, dout, dlse, scale, softcap, diag)
    dq, dk, dv, dbias, dsinks = kernel.attention_backward(*inputs, needs_bias=needs_bias, interpret=interpret)
    nothing = jnp.zeros(NOT_ASKED_FOR, q.dtype)
    return dq, dk, dv, nothing if dbias is None else dbias, nothing if dsinks is None else dsinks


def _within_reach(bias: jax.Array | None) -> jax.Array | None:
    """The smallest numbers, with which some mask, times log2(e) would be -inf: a row of them is to stay finite."""
    if bias is None or bias.dtype == jnp.float16:
        return bias
    smallest = jnp.asarray(jnp.finfo(jnp.float32).min / 4, bias.dtype)
    return jnp.where(jnp.isneginf(bias), bias, jnp.maximum(bias, smallest))
