"""Values of ragged_dot and grouped_mm on the CPU path, and that both are proper torch ops."""

import pytest
import torch
from ragged_dot import grouped_mm, ragged_dot
from ragged_dot.cases import EDGE_CASES
from ragged_dot.op import _product, _weight_gradient
from ragged_dot.products import chooser
from ragged_dot_checks import assert_close, loop_over_groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _inputs(case, dtype, transpose_rhs=False):
    generator = torch.Generator().manual_seed(case.m + case.k)
    inner = (case.n, case.k) if transpose_rhs else (case.k, case.n)
    lhs = torch.randn(case.m, case.k, generator=generator).to(dtype)
    rhs = torch.randn(case.g, *inner, generator=generator).to(dtype)
    return lhs, rhs, torch.tensor(case.group_sizes, dtype=torch.int32)


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_equals_a_loop_over_groups(case, dtype, transpose_rhs):
    lhs, rhs, sizes = _inputs(case, dtype, transpose_rhs)
    got = ragged_dot(lhs, rhs, sizes, transpose_rhs=transpose_rhs)
    assert got.shape == (case.m, case.n)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_close(got, loop_over_groups(lhs, rhs, list(case.group_sizes), transpose_rhs), dtype, case.k)


# Row counts on both sides of every threshold in products.py, k on both sides of SHORT_K.
@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "n"), [(96, 64), (1088, 72), (1100, 36)])
def test_every_way_to_multiply_gives_the_same(dtype, k, n, transpose_rhs):
    sizes = [1, 2, 3, 0, 4, 5, 7, 8, 12, 16, 17, 32, 33, 48, 1, 64, 130]
    torch.manual_seed(k)
    lhs = torch.randn(sum(sizes) + 3, k).to(dtype)
    rhs = torch.randn(len(sizes), *((n, k) if transpose_rhs else (k, n))).to(dtype)
    got = ragged_dot(lhs, rhs, torch.tensor(sizes), transpose_rhs=transpose_rhs)
    assert_close(got, loop_over_groups(lhs, rhs, sizes, transpose_rhs), dtype, k)


def test_without_onednn_the_result_is_the_same(monkeypatch):
    lhs, rhs, sizes = torch.randn(12, 40), torch.randn(3, 16, 40), torch.tensor([1, 8, 3])
    with_onednn = ragged_dot(lhs, rhs, sizes, transpose_rhs=True)
    assert chooser(lhs, rhs, True)(8) is not None
    monkeypatch.setattr("ragged_dot.products.has_onednn", lambda: False)
    assert chooser(lhs, rhs, True)(8) is None
    torch.testing.assert_close(ragged_dot(lhs, rhs, sizes, transpose_rhs=True), with_onednn)


def test_rows_of_no_group_are_zero_even_with_nan_there():
    x, w, sizes = torch.ones(6, 2), torch.ones(3, 2, 2), torch.tensor([2, 0, 1])
    wanted = torch.tensor([[2.0, 2.0]] * 3 + [[0.0, 0.0]] * 3)
    assert torch.equal(ragged_dot(x, w, sizes), wanted)
    x[3:] = float("nan")
    x.requires_grad_(), w.requires_grad_()
    out = ragged_dot(x, w, sizes)
    assert torch.equal(out, wanted)
    out.sum().backward()
    assert torch.equal(x.grad, wanted)  # a row of ones times ones, for the first three rows only
    assert torch.equal(w.grad, torch.tensor([2.0, 0.0, 1.0]).view(3, 1, 1).expand(3, 2, 2))


@pytest.mark.parametrize("size_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("dtype", "m", "k", "n"), [(torch.float32, 6, 7, 5), (torch.bfloat16, 6, 1025, 512)])
def test_unaligned_sizes_transposed_weights_and_both_integer_types(dtype, m, k, n, size_dtype):
    lhs, rhs = torch.randn(m, k).to(dtype), torch.randn(3, n, k).to(dtype)
    sizes = torch.tensor([1, 2, 3], dtype=size_dtype)
    wanted = loop_over_groups(lhs, rhs, [1, 2, 3], transpose_rhs=True)
    for got in (ragged_dot(lhs, rhs.transpose(1, 2), sizes), ragged_dot(lhs, rhs, sizes, transpose_rhs=True)):
        assert_close(got, wanted, dtype, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_not_contiguous(dtype):
    sizes = [1, 2, 3, 4, 8, 12, 17]
    for k in (64, 1088):
        lhs = torch.randn(k, sum(sizes)).to(dtype).t()
        for nk in (False, True):
            rhs = torch.randn(len(sizes), *((16, k) if nk else (k, 16))).to(dtype)
            got = ragged_dot(lhs, rhs, torch.tensor(sizes), transpose_rhs=nk)
            assert_close(got, loop_over_groups(lhs, rhs, sizes, nk), dtype, k)


def test_any_strides():
    lhs, rhs, sizes = torch.randn(16, 9).t(), torch.randn(8, 20, 6)[::2, 2:18, 1:6], torch.tensor([2, 0, 3, 1])
    assert_close(ragged_dot(lhs, rhs, sizes), loop_over_groups(lhs, rhs, [2, 0, 3, 1]), torch.float32, 16)
    assert_close(
        ragged_dot(lhs, rhs.transpose(1, 2), sizes, transpose_rhs=True),
        loop_over_groups(lhs, rhs, [2, 0, 3, 1]),
        torch.float32,
        16,
    )


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64], ids=str)
def test_grouped_mm_equals_torch(offs_dtype):
    x, w = torch.randn(24, 16).bfloat16(), torch.randn(4, 16, 32).bfloat16()
    ends = torch.tensor([3, 3, 20, 24], dtype=torch.int32)
    wanted = torch.nn.functional.grouped_mm(x, w, offs=ends)
    assert_close(grouped_mm(x, w, ends.to(offs_dtype)), wanted, torch.bfloat16, 16)


def test_grouped_mm_takes_what_torch_refuses():
    x, w, offs = torch.randn(6, 7), torch.randn(3, 5, 7).transpose(1, 2), torch.tensor([1, 3, 5])
    got = grouped_mm(x, w, offs)
    assert_close(got, loop_over_groups(x, w, [1, 2, 2]), torch.float32, 7)
    assert torch.equal(got[5], torch.zeros(5))


@pytest.mark.parametrize(("k", "n"), [(16, 24), (7, 5)])
def test_opcheck_of_the_product(k, n):
    for dtype in (torch.float32, torch.bfloat16):
        lhs = torch.randn(6, k, dtype=dtype, requires_grad=True)
        rhs = torch.randn(3, k, n, dtype=dtype, requires_grad=True)
        sizes = torch.tensor([2, 0, 3], dtype=torch.int32)
        torch.library.opcheck(_product.overload, (lhs, rhs, sizes, False))
        torch.library.opcheck(_product.overload, (torch.randn(k, 6, dtype=dtype).t(), rhs, sizes, False))
        torch.library.opcheck(_product.overload, (lhs.detach()[:0].requires_grad_(), rhs, sizes * 0, False))


def test_opcheck_of_the_weight_gradient():
    lhs, grad = torch.randn(6, 5, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    for transposed in (False, True):
        torch.library.opcheck(_weight_gradient.overload, (lhs, grad, torch.tensor([2, 0, 3]), transposed))
