"""The public ragged dot, and the two torch ops under it: the product, and the gradient of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu
from ._bridge import Lazy, jax_op
from .checks import autocast_dtype, can_read_values, check_product

_product = jax_op(
    "ragged_dot",
    namespace=__package__,
    fn=Lazy(".kernel:ragged_dot_forward", __package__),
    torch_fn=cpu.ragged_dot,
    shape_fn=Lazy(".shapes:ragged_dot", __package__),
)
_weight_gradient = jax_op(
    "ragged_dot_weight_gradient",
    namespace=__package__,
    fn=Lazy(".kernel:ragged_dot_weight_gradient", __package__),
    torch_fn=cpu.ragged_dot_weight_gradient,
    shape_fn=Lazy(".shapes:ragged_dot_weight_gradient", __package__),
)


def ragged_dot(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *, transpose_rhs: bool = False) -> Tensor:
    """Multiply contiguous groups of rows of `lhs`, each group by its own matrix of `rhs`.

    The first group_sizes[0] rows belong to group 0, the next group_sizes[1] to group 1, and so on. Rows past
    sum(group_sizes) are zero, whatever lhs holds there.

    Shapes   lhs (m, k), rhs (g, k, n) or (g, n, k) with transpose_rhs, group_sizes (g,)  ->  (m, n); any may be 0
    Dtypes   float32, bfloat16, float16, float64, the same for lhs and rhs; sums in float32 (float64 for float64, which
             TPUs lack); group_sizes int32 or int64. Under autocast both are taken in the autocast dtype
    Grads    lhs and rhs, any order; the gradient of a group without rows is exactly zero
    Raises   ValueError: shapes that do not match, tensors on two devices; on CPU and CUDA also a negative size and
             sizes that sum above m (on TPU, where a look at values would wait, a negative size counts as 0 and rows
             past m do not exist).  TypeError: dtypes outside the list above
    Source   the meaning of jax.lax.ragged_dot
    """
    check_product(
        "ragged_dot", lhs, rhs, group_sizes, ("lhs", "rhs", "group_sizes"), "g, n, k" if transpose_rhs else "g, k, n"
    )
    return product(lhs, rhs, group_sizes, transpose_rhs)


def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply groups of rows of `input`, group i ending before row offs[i], each by its own matrix of `weight`.

    Shapes   input (m, k), weight (g, k, n), offs (g,)  ->  (m, n); rows from offs[-1] on are zero
    Dtypes   as ragged_dot; offs int32 or int64. No alignment is asked for
    Grads    input and weight, as ragged_dot
    Raises   as ragged_dot; ValueError on CPU: offs that decrease or exceed m
    Source   torch.nn.functional.grouped_mm for a 2-d input and 3-d weight
    """
    check_product("grouped_mm", input, weight, offs, ("input", "weight", "offs"), "g, k, n")
    if can_read_values(offs):
        _check_offsets(offs.tolist(), input.shape[0])
    return product(input, weight, torch.diff(offs, prepend=offs.new_zeros(1)), False)


def product(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, transpose_rhs: bool) -> Tensor:
    """ragged_dot of checked arguments."""
    dtype = autocast_dtype(lhs)
    if dtype is not None:
        lhs = lhs.to(dtype)
        # The CPU path casts each group's weights as it comes to them: only groups in use, and no second copy of all.
        rhs = rhs if lhs.device.type == "cpu" else rhs.to(dtype)
    if _is_transposed_view(rhs):
        rhs, transpose_rhs = rhs.transpose(1, 2), not transpose_rhs
    return _product(lhs, rhs, group_sizes, transpose_rhs)


def _check_offsets(ends: list[int], m: int) -> None:
    start = 0
    for i, end in enumerate(ends):
        if end < start:
            before = f"offs[{i - 1}] = {start}" if i else "0"
            raise ValueError(
                f"grouped_mm: offs must not decrease; got offs[{i}] = {end} after {before}. "
                f"If these are group sizes, use ragged_dot."
            )
        start = end
    if start > m:
        raise ValueError(
            f"grouped_mm: offs must be at most m = {m}, the rows of input; got offs[{len(ends) - 1}] = {start}."
        )


def _is_transposed_view(rhs: Tensor) -> bool:
    """Whether rhs.transpose(1, 2) is what lies row-major in memory. Then no path has to copy it."""
    return rhs.stride(1) == 1 and rhs.stride(2) != 1


def _go_back(saved, needs, grad):
    sizes, transposed = saved.group_sizes, saved.transpose_rhs
    to_lhs = to_rhs = None
    if needs.lhs:
        to_lhs = _product(grad, saved.rhs, sizes, not transposed)
    if needs.rhs:
        to_rhs = _weight_gradient(saved.lhs, grad, sizes, transposed).to(saved.rhs.dtype)
    return to_lhs, to_rhs, None


def _go_back_twice(saved, needs, grad_rhs):
    sizes, transposed = saved.group_sizes, saved.transpose
    to_lhs = to_grad = None
    if needs.lhs:
        to_lhs = _product(saved.grad, grad_rhs, sizes, not transposed)
    if needs.grad:
        to_grad = _product(saved.lhs, grad_rhs, sizes, transposed)
    return to_lhs, to_grad, None


def _inputs_to_keep(needs) -> tuple[str, ...]:
    """lhs is kept only for the gradient of rhs; rhs also tells the dtype of that gradient."""
    return ("lhs", "rhs", "group_sizes") if needs.rhs else ("rhs", "group_sizes")


_product.set_backward(_go_back, save=_inputs_to_keep)
_weight_gradient.set_backward(_go_back_twice)
