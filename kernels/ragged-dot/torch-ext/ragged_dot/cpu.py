"""The torch path of the ragged dot: one product per group that has rows (products.py).

The same code serves CUDA tensors, by torch.mm.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import read_group_sizes
from .products import can_run_together, chooser, multiply_into


def ragged_dot(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, transpose_rhs: bool = False) -> Tensor:
    """(m, k), (g, k, n) or (g, n, k), (g,) -> (m, n) in lhs.dtype; groups without rows are not read."""
    m, n = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    sizes = read_group_sizes(group_sizes, m)
    out = lhs.new_empty((m, n))
    choose, together = chooser(lhs, rhs, transpose_rhs), can_run_together(lhs, rhs)
    start, waiting = 0, []  # groups that one call of grouped_mm will do
    for group, size in enumerate(sizes):
        if not size:
            continue
        way = choose(size)
        if way is None and together:
            waiting.append((group, size))
        else:
            start = _run_together(out, lhs, rhs, waiting, start, transpose_rhs)
            end = start + size
            weight = rhs[group].to(lhs.dtype)  # a cast only under autocast
            multiply_into(out[start:end], lhs[start:end], weight, transpose_rhs, way)
            waiting, start = [], end
    start = _run_together(out, lhs, rhs, waiting, start, transpose_rhs)
    out[start:].zero_()
    return out


def _run_together(out: Tensor, lhs: Tensor, rhs: Tensor, groups: list[tuple[int, int]], start: int, nk: bool) -> int:
    """Rows from `start` on times the matrices of `groups`; returns the end of those rows."""
    if not groups:
        return start
    first, last = groups[0][0], groups[-1][0]
    sizes = dict(groups)
    ends = list(itertools.accumulate(sizes.get(group, 0) for group in range(first, last + 1)))
    rows = slice(start, start + ends[-1])
    weights = rhs[first : last + 1]
    if len(groups) == 1:
        multiply_into(out[rows], lhs[rows], weights[0], nk, None)
    else:
        offs = torch.tensor(ends, dtype=torch.int32)
        out[rows] = F.grouped_mm(lhs[rows], weights.transpose(1, 2) if nk else weights, offs=offs)
    return rows.stop


def ragged_dot_weight_gradient(lhs: Tensor, grad: Tensor, group_sizes: Tensor, transpose: bool = False) -> Tensor:
    """(m, k), (m, n), (g,) -> (g, k, n) in lhs.dtype, or (g, n, k) when transposed."""
    if transpose:
        lhs, grad = grad, lhs
    sizes = read_group_sizes(group_sizes, lhs.shape[0])
    out = lhs.new_empty((len(sizes), lhs.shape[1], grad.shape[1]))
    start = 0
    for group, size in enumerate(sizes):
        if size:
            torch.mm(lhs[start : start + size].t(), grad[start : start + size], out=out[group])
            start += size
        else:
            out[group].zero_()
    return out
