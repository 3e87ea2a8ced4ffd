"""Which expert meets which rows: the table of visits that both kernels walk.

Rows are cut into tiles of `block_m`. A visit is one (group, row tile) pair that share at least one row. Groups are
contiguous, so visits in group order are also in tile order, and a tile at a group boundary is visited by several
groups in a row.

    group sizes [3, 0, 6, 1], block_m 4         visit  group  tile  rows of the tile
    rows  0 1 2 | 3 4 5 6 7 8 | 9               0      0      0     0..3
    tiles 0 0 0   0 1 1 1 1 2   2               1      2      0     3..4
                                                2      2      1     0..4
                                                3      2      2     0..1
                                                4      3      2     1..2

The table is dense integer arithmetic on a (visits, groups) comparison: no sort, no gather, no histogram, so XLA makes
a handful of small fusions of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOW_BITS = 16  # a row bound inside a tile needs fewer bits than this: block_m stays below 2**15


class Visits(NamedTuple):
    """One entry per visit, int32, for scalar prefetch; only the first `count` entries count."""

    group: jax.Array  # (v,) the group, or the last one before it that owns rows when the visit has no rows
    tile: jax.Array  # (v,) the row tile
    rows: jax.Array  # (v,) first row << 16 | row past the last, inside the tile; 0 when the visit has no rows
    count: jax.Array  # () how many visits there are


def row_bounds(rows):
    """Unpack one entry of `Visits.rows` into (first row, row past the last)."""
    return rows >> _LOW_BITS, rows & ((1 << _LOW_BITS) - 1)


def group_bounds(group_sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """First row and row past the last of each group, (g,) each; negative sizes count as 0, rows past m do not exist."""
    sizes = jnp.clip(group_sizes.astype(jnp.int32), 0, m)
    if m * group_sizes.shape[0] < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes), m)
    else:  # a plain sum of clipped sizes could wrap around; adding and clipping is associative
        ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, m), sizes)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    return starts, ends


def visits_of_rows(group_sizes: jax.Array, m: int, block_m: int) -> Visits:
    """Visits that cover every row tile: those of the groups, then one without rows per tile past the last group.

    Empty groups are not visited. There are at most cdiv(m, block_m) + min(g, m) - 1 visits.
    """
    return _visits(group_sizes, m, block_m, keep_empty_groups=False)


def visits_of_groups(group_sizes: jax.Array, m: int, block_m: int) -> Visits:
    """Visits that cover every group: an empty group gets one without rows. Tiles past the last group get none."""
    return _visits(group_sizes, m, block_m, keep_empty_groups=True)


def _visits(group_sizes: jax.Array, m: int, block_m: int, keep_empty_groups: bool) -> Visits:
    g = group_sizes.shape[0]
    tiles_m = -(-m // block_m)
    starts, ends = group_bounds(group_sizes, m)
    first_tiles = starts // block_m
    tiles = jnp.where(ends > starts, (ends - 1) // block_m - first_tiles + 1, 1 if keep_empty_groups else 0)
    last_visits = jnp.cumsum(tiles)  # (g,) the visit past the last of each group
    group_visits = last_visits[-1]

    # Everything about visit v follows from the groups that are over before it and those that are not. All bounds grow
    # with the group, so a maximum or minimum over these two sets picks the right group's entry.
    v = jnp.arange(tiles_m + (g if keep_empty_groups else min(g, m)) - 1, dtype=jnp.int32)[:, None]  # (v, 1)
    over = last_visits <= v  # (v, g)
    group = jnp.sum(over, axis=1, dtype=jnp.int32)
    first_visit = jnp.max(jnp.where(over, last_visits, 0), axis=1)
    start = jnp.max(jnp.where(over, ends, 0), axis=1)
    end = jnp.min(jnp.where(over, m, ends), axis=1)
    last_active = jnp.max(jnp.where(over & (tiles > 0), jnp.arange(g, dtype=jnp.int32), 0), axis=1)
    v = v[:, 0]

    in_group = v < group_visits
    first_tile = jnp.where(in_group, start // block_m, (start + block_m - 1) // block_m)
    tile = jnp.minimum(first_tile + v - first_visit, tiles_m - 1)
    low = jnp.maximum(start - tile * block_m, 0)
    high = jnp.minimum(end - tile * block_m, block_m)
    return Visits(
        group=jnp.where(in_group, group, last_active),
        tile=tile,
        rows=jnp.where(in_group & (high > low), low << _LOW_BITS | high, 0),
        count=group_visits if keep_empty_groups else group_visits + tiles_m - (ends[-1] + block_m - 1) // block_m,
    )
