"""Which experts are in use, and the slots in the order of their experts: small tables, computed by XLA.

A slot is one (token, choice) pair; there are s = t * top_k of them. Where slots are sorted, kernel.py has made every
index that is not an expert into e: such a slot adds nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


def experts_in_use(index: jax.Array, e: int) -> tuple[jax.Array, jax.Array]:
    """(t, top_k) -> (min(e, s),) the experts that serve a slot, ascending, then anything; () how many there are."""
    flat, everyone = index.reshape(-1), jnp.arange(e, dtype=jnp.int32)
    in_use = jnp.any(flat[:, None] == everyone, axis=0)  # (e,)
    rank = jnp.sum(jnp.where(everyone <= everyone[:, None], in_use.astype(jnp.int32), 0), axis=1, dtype=jnp.int32)
    place = jnp.arange(min(e, flat.shape[0]), dtype=jnp.int32)
    table = jnp.sum(rank <= place[:, None], axis=1, dtype=jnp.int32)  # the first expert with more than `place` up to it
    return jnp.minimum(table, e - 1), rank[-1]


def sort_by_expert(index: jax.Array, e: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(t, top_k) -> the slots in the order of their experts (s,), the expert of each (s,), slots per expert (e,)."""
    flat = index.reshape(-1)
    slots = jnp.arange(flat.shape[0], dtype=jnp.int32)
    if flat.shape[0] < 2**16 and e < 2**15:  # one word holds both, and sorting single words is much cheaper
        both = jnp.sort(flat << 16 | slots)
        experts, order = both >> 16, both & 0xFFFF
    else:
        experts, order = jax.lax.sort((flat, slots), num_keys=1)
    counts = jnp.sum(flat[:, None] == jnp.arange(e, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    return order, experts, counts


class Visits(NamedTuple):
    """One entry per visit, and the sorted slots; int32, for scalar prefetch. Only the first `count` visits count."""

    expert: jax.Array  # (v,)
    first: jax.Array  # (v,) its first slot, in the order of experts
    rows: jax.Array  # (v,) how many slots, at most block_m
    tokens: jax.Array  # (s + block_m,) of each slot, slots in the order of their experts; then zeros
    weights: jax.Array  # (s + block_m,) their weights, float32
    count: jax.Array  # ()


def visits_of_experts(index: jax.Array, weights: jax.Array, e: int, block_m: int) -> Visits:
    """Visits of up to block_m slots that cover every slot with an expert, expert by expert. Fewer than 2**16 slots."""
    flat, s = index.reshape(-1), index.size
    everyone, slots = jnp.arange(e, dtype=jnp.int32), jnp.arange(s, dtype=jnp.int32)
    both, sorted_weights = jax.lax.sort((flat << 16 | slots, weights.reshape(-1)), num_keys=1)
    tokens = (both & 0xFFFF) // index.shape[1]

    counts = jnp.sum(flat[:, None] == everyone, axis=0, dtype=jnp.int32)  # (e,)
    visits = (counts + block_m - 1) // block_m
    past = jnp.sum(jnp.where(everyone <= everyone[:, None], visits, 0), axis=1, dtype=jnp.int32)  # visits up to each
    visit = jnp.arange(min(s, s // block_m + e), dtype=jnp.int32)
    over = past <= visit[:, None]  # (v, e): the experts that are done with before a visit
    expert = jnp.minimum(jnp.sum(over, axis=1, dtype=jnp.int32), e - 1)
    done = (visit - jnp.sum(jnp.where(over, visits, 0), axis=1, dtype=jnp.int32)) * block_m
    first = jnp.sum(jnp.where(over, counts, 0), axis=1, dtype=jnp.int32) + done
    rows = jnp.sum(jnp.where(everyone == expert[:, None], counts, 0), axis=1, dtype=jnp.int32) - done
    return Visits(
        expert,
        jnp.minimum(first, s),
        jnp.clip(rows, 0, block_m),
        jnp.pad(tokens, (0, block_m)),
        jnp.pad(sorted_weights, (0, block_m)),
        past[-1],
    )
