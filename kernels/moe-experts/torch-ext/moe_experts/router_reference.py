"""What router_topk means, in plain jax.numpy: the definition the kernel is checked against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

TINY = 1e-20  # epsilon, if none is given: only a token whose chosen scores are all (all but) zero notices


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
    epsilon: float = TINY,
) -> tuple[jax.Array, jax.Array]:
    """(t, e), (e,) -> weights (t, top_k) in logits.dtype, index (t, top_k) int32; see router.py."""
    t, e = logits.shape
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "topk_softmax": lambda x: x}[score](wide)
    choice = scores if bias is None else scores + bias.astype(scores.dtype)
    if top_groups < groups:
        by_group = choice.reshape(t, groups, e // groups)
        group_scores = jnp.sum(_top_k(by_group, min(best_of_group, e // groups))[0], axis=2)
        chosen = _top_k(group_scores, top_groups)[1]  # (t, top_groups)
        kept = jnp.any(chosen[:, :, None] == jnp.arange(groups), axis=1)  # (t, groups)
        choice = jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(t, e)
    index = _top_k(choice, top_k)[1]
    weights = jnp.take_along_axis(scores, index, axis=1)
    if score == "topk_softmax":
        weights = jax.nn.softmax(weights)
    elif renormalize:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + epsilon)
    return (weights * scale).astype(logits.dtype), index.astype(jnp.int32)


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """XLA takes a NaN for the largest or the smallest number, by its sign; here it has none."""
    return jax.lax.top_k(jnp.where(jnp.isnan(x), jnp.nan, x), k)
