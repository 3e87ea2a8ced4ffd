"""Which queries meet which pages: small tables, computed by XLA, that the kernel of paged.py walks.

A tile is up to block_q queries of one sequence, one after the other. The pages its queries see are cut into blocks of
block_pages; a visit is one tile over one block, and all visits of a tile follow each other. A tile that sees nothing
has one visit without pages, which writes its zeros.

    pages of 4 keys, 2 per block, context lengths [13, 3], one query each       visit  tile  block  pages
                                                                                0      0     0      0, 1
                                                                                1      0     1      2, 3
                                                                                2      1     0      0

Dense integer arithmetic on (tiles, sequences) and (visits, tiles) comparisons: no sort or scan, so XLA makes a handful
of small fusions of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """One entry per tile, int32, and for each token where its tile is."""

    sequence: jax.Array  # (tiles,)
    position: jax.Array  # (tiles,) of its first query among the keys of its sequence
    token: jax.Array  # (tiles,) its first query
    used: jax.Array  # (tiles,) bool: whether it has a query
    tile_of: jax.Array  # (total_q,)
    row_of: jax.Array  # (total_q,) in its tile


class Visits(NamedTuple):
    """int32, for scalar prefetch; of the first two only the first `count` entries count."""

    tile: jax.Array  # (visits,)
    block: jax.Array  # (visits,) 0 for the first visit of a tile
    first_page: jax.Array  # (tiles,) of those that the tile sees
    past_key: jax.Array  # (tiles,) the number of the first key that no query of the tile sees
    count: jax.Array  # ()


def sequence_of_tokens(q_starts: jax.Array, total_q: int) -> jax.Array:
    """(s + 1,) -> (total_q,); s for a token that belongs to no sequence."""
    token = jnp.arange(total_q, dtype=jnp.int32)
    return jnp.sum(q_starts[1:] <= token[:, None], axis=1, dtype=jnp.int32)


def one_query_tiles(q_starts: jax.Array, lengths: jax.Array, total_q: int) -> Tiles:
    """A tile for every token, used by those that belong to a sequence."""
    token = jnp.arange(total_q, dtype=jnp.int32)
    sequence = sequence_of_tokens(q_starts, total_q)
    here = jnp.minimum(sequence, lengths.shape[0] - 1)
    position = lengths[here] - q_starts[here + 1] + token
    return Tiles(here, position, token, sequence < lengths.shape[0], token, jnp.zeros_like(token))


def last_query_tiles(q_starts: jax.Array, lengths: jax.Array, total_q: int) -> Tiles:
    """A tile for every sequence, used by those with one query."""
    sequence = sequence_of_tokens(q_starts, total_q)
    here = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    single = q_starts[1:] - q_starts[:-1] == 1
    token = jnp.clip(q_starts[:-1], 0, total_q - 1)
    return Tiles(here, lengths - 1, token, single, jnp.minimum(sequence, here[-1]), jnp.zeros_like(sequence))


def many_query_tiles(q_starts: jax.Array, lengths: jax.Array, total_q: int, block_q: int) -> Tiles:
    """Tiles of block_q queries, of the sequences with more than one query."""
    n, tiles = lengths.shape[0], total_q // block_q + lengths.shape[0]
    sizes = q_starts[1:] - q_starts[:-1]
    of_sequence = jnp.where(sizes == 1, 0, (sizes + block_q - 1) // block_q)
    past = _running_sum(of_sequence)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    sequence = jnp.sum(past <= tile[:, None], axis=1, dtype=jnp.int32)
    here = jnp.minimum(sequence, n - 1)
    done = (tile - past[here] + of_sequence[here]) * block_q  # queries of the sequence before the tile
    used = sequence < n
    owner = jnp.minimum(sequence_of_tokens(q_starts, total_q), n - 1)
    inside = jnp.arange(total_q, dtype=jnp.int32) - q_starts[owner]
    tile_of = jnp.clip(past[owner] - of_sequence[owner] + inside // block_q, 0, tiles - 1)
    return Tiles(here, lengths[here] - sizes[here] + done, q_starts[here] + done, used, tile_of, inside % block_q)


def visits_of_tiles(
    tiles: Tiles, lengths: jax.Array, *, block_q: int, page_size: int, block_pages: int, most_pages: int,
    window: int | None, causal: bool, whole: bool,
) -> Visits:  # fmt: skip
    """The pages from the first key that the first query sees to the last that the last one sees, in blocks.

    whole   tiles that are not used are visited as well, to write zeros
    """
    past_key = lengths[tiles.sequence]
    if causal:
        past_key = jnp.minimum(past_key, tiles.position + block_q)
    past_key = jnp.clip(jnp.where(tiles.used, past_key, 0), 0, most_pages * page_size)
    past_page = (past_key + page_size - 1) // page_size
    first_key = jnp.zeros_like(past_key) if window is None else jnp.maximum(tiles.position - window, 0)
    first_page = jnp.minimum(first_key // page_size, past_page)
    blocks = jnp.maximum((past_page - first_page + block_pages - 1) // block_pages, 1)
    blocks = blocks if whole else jnp.where(tiles.used, blocks, 0)
    past = _running_sum(blocks)
    visit = jnp.arange(blocks.shape[0] * -(-most_pages // block_pages), dtype=jnp.int32)
    over = past <= visit[:, None]  # (visits, tiles): the tiles that are done with before
    tile = jnp.minimum(jnp.sum(over, axis=1, dtype=jnp.int32), blocks.shape[0] - 1)
    block = visit - jnp.sum(jnp.where(over, blocks, 0), axis=1, dtype=jnp.int32)
    return Visits(tile, block, first_page, past_key, past[-1])


def _running_sum(counts: jax.Array) -> jax.Array:
    at = jnp.arange(counts.shape[0])
    return jnp.sum(jnp.where(at <= at[:, None], counts, 0), axis=1, dtype=jnp.int32)
