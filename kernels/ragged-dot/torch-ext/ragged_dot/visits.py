"""Which group meets which rows: the table of visits that both kernels walk.

Rows are cut into tiles of `block_m`. A visit is one (group, row tile) pair that share at least one row. Groups are
contiguous, so visits in group order are also in tile order, and a tile at a group boundary is visited by several
groups in a row.

    group sizes [3, 0, 6, 1], block_m 4         visit  group  tile  rows of the tile
    rows  0 1 2 | 3 4 5 6 7 8 | 9               0      0      0     0..3
    tiles 0 0 0   0 1 1 1 1 2   2               1      2      0     3..4
                                                2      2      1     0..4
                                                3      2      2     0..1
                                                4      3      2     1..2

The table is dense integer arithmetic on (groups, groups) and (visits, groups) comparisons: no sort, gather, scan or
histogram, so XLA makes a handful of small fusions of it. Their cost grows with groups * (groups + tiles): meant for up
to some thousand groups, and for row tiles few enough that four tables of one word per visit fit scalar memory (1 MiB).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOW_BITS = 16  # a row bound inside a tile needs fewer bits than this: block_m stays below 2**15


class Visits(NamedTuple):
    """One entry per visit, int32, for scalar prefetch; only the first `count` entries count."""

    group: jax.Array  # (v,) the group; the last active one before it when the visit has no rows of a group
    tile: jax.Array  # (v,) the row tile
    source: jax.Array  # (v,) the row tile to read: `tile`, or the one already there when no rows are needed
    rows: jax.Array  # (v,) first row << 16 | row past the last, inside the tile; past the last is 0 without rows
    count: jax.Array  # () how many visits there are


def row_bounds(rows):
    """Unpack one entry of `Visits.rows` into (first row, row past the last)."""
    return rows >> _LOW_BITS, rows & ((1 << _LOW_BITS) - 1)


def group_bounds(group_sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """First row and row past the last of each group, (g,) each; negative sizes count as 0, rows past m do not exist."""
    sizes = jnp.clip(group_sizes.astype(jnp.int32), 0, m)
    if m * group_sizes.shape[0] < 2**31:
        past = _sum_up_to(sizes)
        return jnp.minimum(past - sizes, m), jnp.minimum(past, m)
    # A plain sum of clipped sizes could wrap around; adding and clipping at m cannot, and is associative.
    past = jax.lax.associative_scan(lambda a, b: jnp.where(a > m - b, m, a + b), sizes)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), past[:-1]]), past


def visits_of_rows(group_sizes: jax.Array, m: int, block_m: int) -> Visits:
    """Visits that cover every row: those of the groups, then one without a group per tile with rows past the last.

    Groups without rows are not visited. There are at most cdiv(m, block_m) + min(g + 1, m) - 1 visits.
    """
    return _visits(group_sizes, m, block_m, keep_empty_groups=False)


def visits_of_groups(group_sizes: jax.Array, m: int, block_m: int) -> Visits:
    """Visits that cover every group: one without rows gets a visit too. Rows past the last group get none."""
    return _visits(group_sizes, m, block_m, keep_empty_groups=True)


def _visits(group_sizes: jax.Array, m: int, block_m: int, keep_empty_groups: bool) -> Visits:
    g, tiles_m = group_sizes.shape[0], -(-m // block_m)
    starts, ends = group_bounds(group_sizes, m)
    tiles = jnp.where(ends > starts, (ends - 1) // block_m - starts // block_m + 1, int(keep_empty_groups))
    last_visits = _sum_up_to(tiles)  # (g,) the visit past the last of each group

    # Everything about a visit follows from the groups that are over before it and those that are not. All bounds grow
    # with the group, so a maximum or minimum over these two sets picks the right group's entry.
    length = tiles_m + (g if keep_empty_groups else min(g + 1, m)) - 1
    over = last_visits <= jnp.arange(length, dtype=jnp.int32)[:, None]  # (v, g)
    groups_over = jnp.sum(over, axis=1, dtype=jnp.int32)
    first_visit = jnp.max(jnp.where(over, last_visits, 0), axis=1)
    start = jnp.max(jnp.where(over, ends, 0), axis=1)
    end = jnp.min(jnp.where(over, m, ends), axis=1)
    last_active = jnp.max(jnp.where(over & (tiles > 0), jnp.arange(g, dtype=jnp.int32), 0), axis=1)

    visit = jnp.arange(length, dtype=jnp.int32)
    in_group = groups_over < g
    tile = jnp.minimum(start // block_m + visit - first_visit, tiles_m - 1)
    low = jnp.maximum(start - tile * block_m, 0)
    high = jnp.where(in_group & (end > start), jnp.minimum(end - tile * block_m, block_m), 0)
    count = jnp.sum(tiles)
    if not keep_empty_groups:
        rows_in_groups = jnp.max(ends)
        count += jnp.where(rows_in_groups < m, tiles_m - rows_in_groups // block_m, 0)
    source = jnp.where(high > 0, tile, jnp.maximum(start - 1, 0) // block_m)
    group = jnp.where(in_group, groups_over, last_active)
    return Visits(group, tile, source, low << _LOW_BITS | high, count)


def _sum_up_to(x):
    """Inclusive running sum of a short vector, as one masked reduction (XLA's scans take several steps)."""
    i = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(i <= i[:, None], x, 0), axis=1, dtype=jnp.int32)
