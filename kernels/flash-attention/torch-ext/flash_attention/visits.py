"""Which block of rows meets which block of keys: the table of visits that the kernels walk.

A row sees the keys lo <= key < hi. A block of rows sees the blocks of keys between its least `lo` and its greatest
`hi`; each such pair is a visit, and a visit costs a grid step. A block of rows that sees nothing still gets one, which
writes its zeros. In a visit that is not `masked` every row sees every key of the block.

    causal, 4 blocks of rows and keys     rows  0  1  1  2  2  2  3  3  3  3
                                          keys  0  0  1  0  1  2  0  1  2  3
                                        masked  x     x        x           x

The table is dense integer arithmetic, no sort or gather: a few fusions for XLA. Three words per pair of blocks have to
fit scalar memory (1 MiB): enough for a batch of 8 with 32768 rows and keys each, or a sequence of 131072.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Flags of a visit. FIRST and LAST of what the kernel accumulates over; in the backward kernel that is a block of keys,
# and the other two are the first and last visit of its block of rows.
FIRST, LAST, MASKED, FIRST_OF_ROWS, LAST_OF_ROWS = 1, 2, 4, 8, 16
_FLAG_BITS, _ROW_BITS = 5, 16
_FAR = 2**30


class Visits(NamedTuple):
    """One entry per visit, int32, for scalar prefetch; only the first `count` entries count."""

    rows: jax.Array  # (v,) batch entry << 16 | block of rows
    keys: jax.Array  # (v,) block of keys << 5 | flags
    count: jax.Array  # () how many visits there are
    out: jax.Array | None = (
        None  # (v,) backward: span of rows << 16 | the block of rows whose gradient is next to be done
    )


def batch_of(rows):
    return rows >> _ROW_BITS


def row_block_of(rows):
    return rows & ((1 << _ROW_BITS) - 1)


def key_block_of(keys):
    return keys >> _FLAG_BITS


class _Span(NamedTuple):
    """Per block of rows, (b, blocks): what its rows see."""

    first: jax.Array  # least lo of rows that see something
    past: jax.Array  # greatest hi; 0 when no row sees anything
    all_from: jax.Array  # every row sees the keys from here
    all_to: jax.Array  # to here, if all_from is less


def visits_by_rows(lo: jax.Array, hi: jax.Array, lk: int, block_q: int, block_k: int) -> Visits:
    """All visits of a block of rows in turn, keys ascending: what the forward kernel accumulates over."""
    span = _spans(lo, hi, block_q)
    b, blocks_q = span.first.shape
    blocks_k = -(-lk // block_k)
    first = (span.first // block_k).reshape(-1)
    empty = (span.past == 0).reshape(-1)
    first = jnp.where(empty, 0, first)
    visits = jnp.where(empty, 1, -(-span.past.reshape(-1) // block_k) - first)
    ends = jnp.cumsum(visits, dtype=jnp.int32)  # (b * blocks_q,)
    visit = jnp.arange(b * blocks_q * blocks_k, dtype=jnp.int32)[:, None]
    here = (visit >= ends - visits) & (visit < ends)  # (v, b * blocks_q): at most one true per visit

    def pick(x):
        return jnp.sum(jnp.where(here, x.reshape(-1), 0), axis=1, dtype=jnp.int32)

    start = pick(ends - visits)
    block = jnp.arange(b * blocks_q, dtype=jnp.int32)
    rows = pick((block // blocks_q) << _ROW_BITS | block % blocks_q)
    key_block = pick(first) + visit[:, 0] - start
    flags = jnp.where(visit[:, 0] == start, FIRST, 0) | jnp.where(visit[:, 0] == pick(ends) - 1, LAST, 0)
    masked = (pick(span.all_from) > key_block * block_k) | (pick(span.all_to) < (key_block + 1) * block_k)
    flags |= jnp.where(masked, MASKED, 0)
    return Visits(rows, key_block << _FLAG_BITS | flags, ends[-1])


def visits_by_keys(lo: jax.Array, hi: jax.Array, lk: int, block_q: int, block_k: int, span: int) -> Visits:
    """All visits of a block of keys in turn, rows ascending, span after span of `span` blocks of rows.

    The rows that see a block of keys are taken as one range of blocks, and both ends of the range are made to grow with
    the keys. Blocks of rows are then done in order, the one after the other, whatever lo and hi are.
    """
    seen = _spans(lo, hi, block_q)
    b, blocks_q = seen.first.shape
    blocks_k, spans = -(-lk // block_k), -(-blocks_q // span)
    key = jnp.arange(blocks_k, dtype=jnp.int32) * block_k
    sees = (seen.first[:, :, None] < key + block_k) & (seen.past[:, :, None] > key)  # (b, blocks_q, blocks_k)
    sees = jnp.pad(sees, ((0, 0), (0, spans * span - blocks_q), (0, 0))).reshape(b, spans, span, blocks_k)
    row = jnp.arange(span, dtype=jnp.int32)[:, None]
    past = jax.lax.cummax(jnp.max(jnp.where(sees, row + 1, 1), axis=2), axis=2)  # (b, spans, blocks_k)
    first = jax.lax.cummin(jnp.min(jnp.where(sees, row, span), axis=2), axis=2, reverse=True)
    first = jnp.minimum(first, past - 1)  # every block of keys is visited: its gradient may be all zeros
    before = jnp.pad(past[:, :, :-1], ((0, 0), (0, 0), (1, 0)))  # past of the block of keys before
    after = jnp.pad(first[:, :, 1:], ((0, 0), (0, 0), (0, 1)), constant_values=span)  # first of the one after

    visits = (past - first).reshape(-1)
    ends = jnp.cumsum(visits, dtype=jnp.int32)  # (b * spans * blocks_k,)
    visit = jnp.arange(b * spans * span * blocks_k, dtype=jnp.int32)[:, None]
    here = (visit >= ends - visits) & (visit < ends)

    def pick(x):
        return jnp.sum(jnp.where(here, x.reshape(-1), 0), axis=1, dtype=jnp.int32)

    block = jnp.arange(b * spans * blocks_k, dtype=jnp.int32)
    batch, of_span, key_block = (
        pick(x) for x in (block // (spans * blocks_k), block // blocks_k % spans, block % blocks_k)
    )
    row = pick(first) + visit[:, 0] - pick(ends - visits)  # within the span
    next_first = pick(after)
    row_block = of_span * span + row
    flags = jnp.where(row == pick(first), FIRST, 0) | jnp.where(row == pick(past) - 1, LAST, 0)
    flags |= jnp.where(row >= pick(before), FIRST_OF_ROWS, 0) | jnp.where(row < next_first, LAST_OF_ROWS, 0)
    here = (batch * blocks_q + row_block)[:, None] == jnp.arange(b * blocks_q, dtype=jnp.int32)
    masked = (pick(seen.all_from) > key_block * block_k) | (pick(seen.all_to) < (key_block + 1) * block_k)
    flags |= jnp.where(masked, MASKED, 0)
    done = of_span * span + jnp.minimum(row, next_first)
    return Visits(
        rows=batch << _ROW_BITS | row_block,
        keys=key_block << _FLAG_BITS | flags,
        count=ends[-1],
        out=of_span << _ROW_BITS | done,
    )


def _spans(lo: jax.Array, hi: jax.Array, block_q: int) -> _Span:
    b, lq = lo.shape
    blocks = -(-lq // block_q)
    past_end = blocks * block_q - lq
    sees = lo < hi

    def reduce(least, x, of_others, of_missing):
        """Over the rows of each block; `of_others` stands for rows that see nothing, `of_missing` for those past lq."""
        x = jnp.pad(jnp.where(sees, x, of_others), ((0, 0), (0, past_end)), constant_values=of_missing)
        return (jnp.min if least else jnp.max)(x.reshape(b, blocks, block_q), axis=2)

    return _Span(
        first=reduce(True, lo, _FAR, _FAR),
        past=reduce(False, hi, 0, 0),
        all_from=reduce(False, lo, _FAR, 0),
        all_to=reduce(True, hi, 0, _FAR),
    )
