"""Which experts are in use, and the slots in the order of their experts: small tables, computed by XLA.

A slot is one (token, choice) pair; there are s = t * top_k of them. kernel.py has made every index that is not an
expert into e: such a slot adds nothing.
"""

from __future__ import annotations

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
