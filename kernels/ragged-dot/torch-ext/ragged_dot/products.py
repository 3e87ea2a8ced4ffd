"""One group's product on a CPU: the ways to compute it, and which of them reads the weights fastest.

    y (r, n) = x (r, k) times weight (n, k) transposed, or weight (k, n)

A group has few rows, so a product takes as long as reading its weights, and how fast that goes depends on the routine:
for 4 rows of float32 torch.mm reads at a third of the speed of oneDNN's inner product. The thresholds below were
measured on one core of an AMD EPYC 9004 (AVX-512, bfloat16 instructions) with torch 2.13, for k = 2048 and 768; the
comments give the reading speed in GB/s, best against torch.mm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Way = Callable[[Tensor, Tensor], Tensor]

SHORT_K = 1024  # up to here MKL's routine for short sums reads faster than oneDNN's
BLOCKS = 8
LANES = 16  # with the weight as left factor, rows of x fill the lanes of a register; a rest is slow


def multiply_into(out: Tensor, x: Tensor, weight: Tensor, weight_is_nk: bool, way: Way | None) -> None:
    """out (r, n) = x (r, k) times weight, (n, k) or (k, n)."""
    if way is None:
        torch.mm(x, weight.t() if weight_is_nk else weight, out=out)
    else:
        out.copy_(way(x, weight))


def chooser(lhs: Tensor, rhs: Tensor, weight_is_nk: bool) -> Callable[[int], Way | None]:
    """A function from a number of rows to the fastest way to multiply them; None stands for torch.mm."""
    dtype, (rows, columns) = lhs.dtype, rhs.shape[1:]
    on_cpu = lhs.device.type == "cpu" and has_onednn() and rhs.is_contiguous() and rows * columns > 0
    if on_cpu and dtype == torch.float32 and weight_is_nk:
        return functools.partial(_choose_float32_nk, n=rows, k=columns)
    if on_cpu and dtype == torch.float32:
        return functools.partial(_choose_float32_kn, k=rows)
    if on_cpu and dtype == torch.bfloat16 and weight_is_nk:
        return functools.partial(_choose_bfloat16_nk, k=columns)
    return lambda r: None


def can_run_together(lhs: Tensor, rhs: Tensor) -> bool:
    """Whether torch's own grouped_mm takes these: torch.mm in a C++ loop, which saves up to 3 % on small groups."""
    return (
        lhs.device.type == "cpu"
        and lhs.dtype == rhs.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and lhs.is_contiguous()
        and rhs.is_contiguous()
        and rhs.numel() > 0
        and all(size % 8 == 0 for size in rhs.shape[1:])  # it asks for rows of whole 16 bytes
    )


def _choose_float32_nk(r: int, n: int, k: int) -> Way:
    if r == 1 and n % BLOCKS == 0:
        return _weight_blocks_times_x  # 26 against 20 and 14
    if k <= SHORT_K and r <= 4:
        return _weight_times_x  # 19 against 8 for r = 2, 15 against 10 for r = 4
    if 8 <= r <= LANES or (r <= 128 and r % LANES == 0):
        return _onednn_weight_times_x  # 10 against 8 for r = 8, 10 against 6 for r = 16
    return _onednn_x_times_weight  # 12 against 10 for r = 4


def _choose_float32_kn(r: int, k: int) -> Way | None:
    if r == 1:
        return None  # torch.mm reads at 19 and 23
    if r == 2 and k % BLOCKS == 0:
        return _x_blocks_times_weight  # 14 against 11
    return _onednn_x_times_weight_kn  # 12 against 9 for r = 4


def _choose_bfloat16_nk(r: int, k: int) -> Way | None:
    if r == 1 and k > SHORT_K:
        return _two_rows  # 13 against 11: oneDNN's product of one row is slower than that of two
    if 12 <= r <= LANES and k > SHORT_K:
        return _convolve  # 9 against 7 for r = 16
    return None


@functools.cache
def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's inner product as an op, with the weights in plain layout."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def _onednn_x_times_weight(x: Tensor, weight: Tensor) -> Tensor:
    return _onednn(x, weight)


def _onednn_x_times_weight_kn(x: Tensor, weight: Tensor) -> Tensor:
    return _onednn(x, weight.t())


def _onednn_weight_times_x(x: Tensor, weight: Tensor) -> Tensor:
    """The weight takes the part of the input: its rows are read one after the other."""
    return _onednn(weight, x).t()


def _weight_times_x(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(weight, x.t()).t()


def _two_rows(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.expand(2, -1), weight)[:1]


def _weight_blocks_times_x(x: Tensor, weight: Tensor) -> Tensor:
    """MKL's batched routine shares blocks of n among cores and reads each in one go."""
    n, k = weight.shape
    y = torch.bmm(weight.view(BLOCKS, n // BLOCKS, k), x.t().expand(BLOCKS, -1, -1))  # (blocks, n / blocks, r)
    return y.view(n, -1).t()


def _x_blocks_times_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Blocks of k, summed at the end."""
    (r, k), n = x.shape, weight.shape[1]
    return torch.bmm(x.view(r, BLOCKS, -1).transpose(0, 1), weight.view(BLOCKS, k // BLOCKS, n)).sum(0)


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution of one pixel: n pixels with k channels each, r filters."""
    image = weight.view(1, weight.shape[0], 1, weight.shape[1]).permute(0, 3, 1, 2)  # (1, k, n, 1), channels last
    y = F.conv2d(image, x.reshape(*x.shape, 1, 1))  # (1, r, n, 1)
    return y.view(x.shape[0], -1)
