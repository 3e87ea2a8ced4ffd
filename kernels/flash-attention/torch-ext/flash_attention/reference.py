"""What attention is here: plain jax.numpy on whole score matrices. Tests and benchmarks measure everything against it.

s[i, j] = cap(scale * q[i] . k[j]) + bias[i, j] - slope * |diag[i] - j|      for keys lo[i] <= j < hi[i]
out[i]  = sum over j of softmax(s[i, :], and the sink)[j] * v[j]             0 where a row sees nothing
lse[i]  = log of the softmax's denominator                                   -inf there (the sink, if there is one)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attention(q, k, v, lo, hi, bias, slopes, sinks, scale: float, softcap: float, diag=None) -> tuple:
    """(b, lq, hq, d), (b, lk, hk, d), (b, lk, hk, dv) -> (b, lq, hq, dv), (b, hq, lq); float64 stays, else float32."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    group, lk = q.shape[2] // k.shape[2], k.shape[1]
    k, v = (jnp.repeat(x.astype(dtype), group, axis=2) for x in (k, v))
    s = scale * jnp.einsum("bihd,bjhd->bhij", q.astype(dtype), k, precision="highest")
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    if bias is not None:
        s = s + bias.astype(dtype)
    key = jnp.arange(lk)
    if slopes is not None:
        diag = default_diag(q, k) if diag is None else diag
        s = s - slopes.astype(dtype)[..., None, None] * jnp.abs(diag[:, None, :, None] - key).astype(dtype)
    seen = (key >= lo[:, None, :, None]) & (key < hi[:, None, :, None])
    s = jnp.where(seen, s, -jnp.inf)
    logits = s
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(dtype)[:, None, None], (*s.shape[:3], 1))
        logits = jnp.concatenate([s, sink], axis=-1)
    if logits.shape[-1] == 0:
        return jnp.zeros((*q.shape[:3], v.shape[3]), dtype), jnp.full(s.shape[:3], -jnp.inf, dtype)
    lse = jax.nn.logsumexp(logits, axis=-1)
    p = jnp.exp(s - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    return jnp.einsum("bhij,bjhd->bihd", p, v, precision="highest"), lse


def default_diag(q, k):
    """The key on the diagonal of each row when the last row meets the last key, (1, lq)."""
    return (jnp.arange(q.shape[1], dtype=jnp.int32) + (k.shape[1] - q.shape[1]))[None]
