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
    choose = chooser(lhs, rhs, transpose_rhs)
    ways = {group: choose(size) for group, size in enumerate(sizes) if size}
    # In one call, unless most groups have a better way than that call's torch.mm.
    if can_run_together(lhs, rhs) and 2 * list(ways.values()).count(None) > len(ways):
        return _run_together(lhs, rhs, sizes, transpose_rhs)
    out = lhs.new_empty((m, n))
    start = 0
    for group, way in ways.items():
        end = start + sizes[group]
        weight = rhs[group].to(lhs.dtype)  # a cast only under autocast
        multiply_into(out[start:end], lhs[start:end], weight, transpose_rhs, way)
        start = end
    out[start:].zero_()
    return out


def _run_together(lhs: Tensor, rhs: Tensor, sizes: list[int], transpose_rhs: bool) -> Tensor:
    ends = list(itertools.accumulate(sizes))
    offs = torch.tensor(ends, dtype=torch.int32)
    out = F.grouped_mm(lhs, rhs.transpose(1, 2) if transpose_rhs else rhs, offs=offs)
    out[ends[-1] :].zero_()  # grouped_mm leaves what it finds there
    return out


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
