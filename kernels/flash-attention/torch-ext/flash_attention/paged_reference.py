"""What paged attention means: each sequence by itself, in plain jax.numpy and the highest precision of its arguments.

Not for jit: contexts are read as Python numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    q_starts: jax.Array,
    sinks: jax.Array | None = None,
    scale: float = 1.0,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
) -> jax.Array:
    """(total_q, hq, d), (pages, page, hk, d), (pages, page, hk, dv), (s,), (s, most), (s + 1,) -> (total_q, hq, dv)."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    group = q.shape[1] // k_pages.shape[2]
    out = jnp.zeros((*q.shape[:2], v_pages.shape[3]), wide)
    starts = np.asarray(q_starts).tolist()
    for n, length in enumerate(np.asarray(lengths).tolist()):
        rows = slice(starts[n], starts[n + 1])
        pages = np.asarray(page_table)[n, : -(-length // k_pages.shape[1])]
        keys, values = (
            jnp.repeat(x[pages].reshape(-1, *x.shape[2:])[:length].astype(wide), group, axis=1)
            for x in (k_pages, v_pages)
        )
        position = length - (rows.stop - rows.start) + jnp.arange(rows.stop - rows.start)[:, None]
        key = jnp.arange(length)
        seen = (key <= position) | (not causal)
        seen &= (key >= position - window) | (window < 0)
        scores = jnp.einsum("qhd,khd->hqk", q[rows].astype(wide), keys, precision="highest") * scale
        scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:  # one more key, whose value is 0
            sink = jnp.broadcast_to(sinks.astype(wide)[:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sink], axis=2)
            values = jnp.concatenate([values, jnp.zeros_like(values, shape=(1, *values.shape[1:]))])
        if scores.shape[2] == 0:
            continue
        top = jnp.max(scores, axis=2, keepdims=True)
        weights = jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0.0))
        total = jnp.sum(weights, axis=2, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)
        out = out.at[rows].set(jnp.einsum("hqk,khd->qhd", weights, values, precision="highest"))
    return out.astype(q.dtype)
