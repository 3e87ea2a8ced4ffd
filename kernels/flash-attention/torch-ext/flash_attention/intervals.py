"""Which keys each row of queries sees: one interval lo <= key < hi per row, whatever the feature is called.

A row has a diagonal, the key at its own position. A window reaches `left` keys back from there and `right` keys ahead
(None: as far as there are keys; causal: right = 0), inside the keys start ... end that belong to the row's sequence.
All of it is plain torch code on integers, without a look at values. lo and hi never decrease along the rows of a batch
entry; a row with lo >= hi sees nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Window = tuple[int | None, int | None]  # keys before and after the diagonal; None is no limit


class Intervals(NamedTuple):
    """All int32 (b, lq)."""

    lo: Tensor
    hi: Tensor
    diagonal: Tensor


def around(diagonal: Tensor, start: Tensor | int, end: Tensor | int, window: Window) -> Intervals:
    """The window around each row's diagonal, inside start ... end."""
    left, right = window
    lo = torch.zeros_like(diagonal) + start if left is None else _clip(diagonal - left, start, end)
    hi = torch.zeros_like(diagonal) + end if right is None else _clip(diagonal + right + 1, start, end)
    return Intervals(lo, hi, diagonal)


def dense(q: Tensor, lk: int, window: Window, shift: int) -> Intervals:
    """Row i of every batch entry has its diagonal at key i + shift; q is (b, lq, ...)."""
    b, lq = q.shape[:2]
    rows = torch.arange(lq, dtype=torch.int32, device=q.device)
    return Intervals(*(each.expand(b, lq) for each in around(rows + shift, 0, lk, window)))


def segments(ids: Tensor, intervals: Intervals) -> Intervals:
    """The intervals cut down to the run of equal ids that the row is in; ids (b, l)."""
    length = ids.shape[1]
    at = torch.arange(length, dtype=torch.int32, device=ids.device).expand(ids.shape)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    start = torch.where(first, at, 0).cummax(1).values
    # The next run's start, seen from behind: the smallest of those that follow.
    following = torch.where(first, at, length)[:, 1:].flip(1).cummin(1).values.flip(1) if length > 1 else at[:, :0]
    end = torch.nn.functional.pad(following, (0, min(length, 1)), value=length)
    lo, hi, diagonal = intervals
    return Intervals(torch.maximum(lo, start), torch.minimum(hi, end), diagonal)


def padded(real: Tensor, intervals: Intervals) -> Intervals:
    """The intervals cut down to what lies between the first and the last real key of an entry; real (b, lk) bool."""
    at = torch.arange(real.shape[1], dtype=torch.int32, device=real.device)
    start = torch.where(real, at, real.shape[1]).amin(1, keepdim=True)
    end = torch.where(real, at + 1, 0).amax(1, keepdim=True)
    lo, hi, diagonal = intervals
    return Intervals(torch.maximum(lo, start), torch.minimum(hi, end), diagonal)


def packed(rows: int, cu_seqlens_q: Tensor, key_start: Tensor, key_end: Tensor, window: Window) -> Intervals:
    """Sequences one after the other: rows cu_seqlens_q[i] ... see keys key_start[i] ... key_end[i]; bottom-right."""
    sequences = key_start.shape[0]
    row = torch.arange(rows, dtype=torch.int32, device=cu_seqlens_q.device)
    if not sequences:
        return Intervals(*[torch.zeros_like(row)[None]] * 3)
    cu_seqlens_q = cu_seqlens_q.to(torch.int32)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True)
    beyond = sequence >= sequences  # rows past the last sequence see nothing
    sequence = sequence.clamp(max=sequences - 1)
    start, end = key_start.to(torch.int32)[sequence], key_end.to(torch.int32)[sequence]
    last = cu_seqlens_q[1:][sequence]
    start = torch.where(beyond, end, start)
    return Intervals(*(each[None] for each in around(row - last + end, start, end, window)))


def cached(rows: int, start: Tensor | int, end: Tensor, window: Window) -> Intervals:
    """The last of `rows` new rows has its diagonal at the last of keys start ... end; end (b,)."""
    row = torch.arange(rows, dtype=torch.int32, device=end.device)
    end = end.to(torch.int32)[:, None]
    if isinstance(start, Tensor):
        start = torch.minimum(start.to(torch.int32)[:, None].clamp(min=0), end)
    return around(row - rows + end, start, end, window)


def _clip(x: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    x = torch.maximum(x, low) if isinstance(low, Tensor) else x.clamp(min=low)
    return torch.minimum(x, high) if isinstance(high, Tensor) else x.clamp(max=high)
