"""The torch path's plan: pieces of rows that are worth one product with one range of keys.

Reading lo and hi costs a CPU nothing. Sequences that share no key are pieces of their own, so nothing is computed
between them; very short ones share a piece. A piece whose rows all see the same keys, or whose keys are a square
below its diagonal, needs no mask; others are cut small, so that each reads little more than the keys it sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

FEW_KEYS = 64  # sequences are not worth a product of their own below this many keys together
ROWS = 256  # of a piece with a mask: 128 and 512 take 2 to 9 % longer (4096 rows, window of 512, 2 CPUs)

ALL, CAUSAL, MASKED = "all", "causal", "masked"


class Piece(NamedTuple):
    batch: slice
    rows: slice
    keys: slice
    kind: str  # ALL, CAUSAL (a square, its diagonal included) or MASKED


def pieces(lo: Tensor, hi: Tensor) -> Iterator[Piece]:
    """Everything that some row sees, each row in at most one piece. lo, hi (b, lq), not decreasing along rows."""
    b, lq = lo.shape
    if not lq:
        return
    alike = b == 1 or all(t.stride(0) == 0 or bool((t == t[:1]).all()) for t in (lo, hi))
    for batch in [slice(0, b)] if alike and b else [slice(i, i + 1) for i in range(b)]:
        first, last = lo[batch.start], hi[batch.start]
        for run in _sequences(first, last):
            yield from _cut(batch, run, first, last)


class _Run(NamedTuple):
    """Rows in a row, and the keys of the first and of the last of them."""

    start: int
    stop: int
    first_lo: int
    last_lo: int
    first_hi: int
    last_hi: int


def _sequences(lo: Tensor, hi: Tensor) -> list[_Run]:
    """Runs of rows without a key in common, short ones together; rows that see nothing are left out."""
    whole = _Run(0, lo.shape[0], int(lo[0]), int(lo[-1]), int(hi[0]), int(hi[-1]))
    if whole.first_lo == whole.last_lo < whole.first_hi:
        return [whole]  # by far the most frequent, and found by looking at four numbers
    seeing = lo < hi
    joined = seeing[1:] & seeing[:-1] & (lo[1:] < hi[:-1])  # to the row before
    starts = torch.nonzero(seeing & ~torch.nn.functional.pad(joined, (1, 0)))[:, 0]
    ends = torch.nonzero(seeing & ~torch.nn.functional.pad(joined, (0, 1)))[:, 0]
    runs: list[_Run] = []
    for run in zip(*(t.tolist() for t in (starts, ends + 1, lo[starts], lo[ends], hi[starts], hi[ends])), strict=True):
        run = _Run(*run)
        before = runs[-1] if runs else None
        if before is not None and before.stop == run.start and run.last_hi - before.first_lo <= FEW_KEYS:
            runs[-1] = before._replace(stop=run.stop, last_lo=run.last_lo, last_hi=run.last_hi)
        else:
            runs.append(run)
    return runs


def _cut(batch: slice, run: _Run, lo: Tensor, hi: Tensor) -> Iterator[Piece]:
    rows, keys = slice(run.start, run.stop), slice(run.first_lo, run.last_hi)
    if run.first_lo == run.last_lo:
        if run.first_hi == run.last_hi:
            yield Piece(batch, rows, keys, ALL)
            return
        if run.stop - run.start == keys.stop - keys.start and run.first_hi == keys.start + 1:
            diagonal = torch.arange(run.first_hi, run.last_hi + 1, dtype=hi.dtype, device=hi.device)
            if torch.equal(hi[rows], diagonal):
                yield Piece(batch, rows, keys, CAUSAL)
                return
    for start in range(run.start, run.stop, ROWS):
        end = min(start + ROWS, run.stop)
        yield Piece(batch, slice(start, end), slice(int(lo[start]), int(hi[end - 1])), MASKED)


def rows_at_a_time(piece: Piece, rows: int, lo: Tensor, hi: Tensor) -> Iterator[Piece]:
    """The piece in parts of at most `rows` rows, each with the keys that it sees."""
    for start in range(piece.rows.start, piece.rows.stop, rows):
        end = min(start + rows, piece.rows.stop)
        keys = piece.keys
        if piece.kind != ALL:
            entry = piece.batch.start
            keys = slice(int(lo[entry, start]), int(hi[entry, end - 1]))
        yield Piece(piece.batch, slice(start, end), keys, ALL if piece.kind == ALL else MASKED)


def mask_of(piece: Piece, lo: Tensor, hi: Tensor) -> Tensor:
    """True where a row of the piece does not see a key of it: (b or 1, 1, rows, keys)."""
    at = torch.arange(piece.keys.start, piece.keys.stop, dtype=lo.dtype, device=lo.device)
    part = (slice(piece.batch.start, piece.batch.start + 1), piece.rows)
    lo, hi = lo[part], hi[part]
    one_start, one_end = int(lo[0, -1]) == piece.keys.start, int(hi[0, 0]) == piece.keys.stop
    before = None if one_start else at < lo[:, None, :, None]
    if one_end:
        return torch.zeros_like(lo[:, None, :, None], dtype=torch.bool) if before is None else before
    behind = at >= hi[:, None, :, None]
    return behind if before is None else behind | before
