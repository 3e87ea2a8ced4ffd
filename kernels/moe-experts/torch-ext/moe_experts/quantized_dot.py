"""The ragged dot with quantised weights, as a torch op: rows of `lhs` in groups, each times the weight of its expert.

Only weights of groups that have rows are read, and one of them at a time is held in lhs' dtype. On TPU this op runs
where the fused layer does not: see quantized_dot_kernel.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._bridge import Lazy, jax_op
from ._ragged_dot.checks import autocast_dtype, read_group_sizes
from .quantized import fill_with_weight, how_stored, parts_of_weight
from .stored import ALL, Stored

FEW = 2  # rows of lhs, which float32 parts of a weight multiply faster than a bfloat16 copy of all of it


def quantized_dot(lhs: Tensor, data: Tensor, scale: Tensor, group_sizes: Tensor) -> Tensor:
    """(m, k) times (k, n) of each group -> (m, n). Gradient: lhs, any order."""
    return _product(lhs.to(autocast_dtype(lhs) or lhs.dtype), data, scale, group_sizes, lhs.shape[1], False)


def run(lhs: Tensor, data: Tensor, scale: Tensor, group_sizes: Tensor, k: int, transpose: bool = False) -> Tensor:
    """(m, k) -> (m, n), or with the weights transposed (m, n) -> (m, k)."""
    m, n = lhs.shape[0], data.shape[2]
    out = lhs.new_empty((m, k if transpose else n))
    stored = how_stored(data, scale, k)
    start = 0
    for group, size in enumerate(read_group_sizes(group_sizes, m)):
        if size:
            rows, result = lhs[start : start + size], out[start : start + size]
            multiply = _by_parts if size <= FEW or lhs.dtype == torch.float32 else _by_whole_weight
            multiply(result, rows, data[group], scale[group], stored, k, transpose)
            start += size
    out[start:].zero_()
    return out


def _by_parts(out: Tensor, x: Tensor, data: Tensor, scale: Tensor, stored: Stored, k: int, transpose: bool) -> None:
    """Each part of the weight is multiplied while it is in the cache. In float32: sums go over several parts."""
    late = _multiplies_columns(stored)
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide) * scale if late and transpose else x.to(wide)
    total = x.new_zeros((x.shape[0], data.shape[1]))
    for rows, part in parts_of_weight(data, None if late else scale, stored, k, wide):
        if transpose:
            out[:, rows].copy_(x @ part.t())
        else:
            total.addmm_(x[:, rows], part)
    if not transpose:
        out.copy_(total * scale if late else total)


def _by_whole_weight(
    out: Tensor, x: Tensor, data: Tensor, scale: Tensor, stored: Stored, k: int, transpose: bool
) -> None:
    # In float16 products without scales would overflow.
    late = _multiplies_columns(stored) and x.dtype != torch.float16
    weight = x.new_empty((k, data.shape[1]))
    fill_with_weight(weight, data, None if late else scale, stored)
    wide = torch.promote_types(x.dtype, torch.float32)
    if late and transpose:
        x = (x.to(wide) * scale).to(x.dtype)
    torch.mm(x, weight.t() if transpose else weight, out=out)
    if late and not transpose:
        out.copy_(out.to(wide) * scale)


def _multiplies_columns(stored: Stored) -> bool:
    """Whether scales belong to whole columns, so that products can be multiplied by them in place of the weight."""
    return stored.rows == ALL and stored.columns in (ALL, 1)


_product = jax_op(
    "quantized_dot",
    namespace=__package__,
    fn=Lazy(".quantized_dot_kernel:quantized_dot", __package__),
    torch_fn=run,
    shape_fn=Lazy(".shapes:quantized_dot", __package__),
)


def _go_back(saved, needs, grad):
    to_lhs = _product(grad, saved.data, saved.scale, saved.group_sizes, saved.k, not saved.transpose)
    return (to_lhs if needs.lhs else None), None, None, None


_product.set_backward(_go_back, save=("data", "scale", "group_sizes"))
