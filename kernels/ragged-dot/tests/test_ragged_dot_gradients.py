"""Gradients of ragged_dot and grouped_mm: against a loop, for unused groups, and only where asked for."""

import pytest
import torch
from ragged_dot import grouped_mm, ragged_dot
from ragged_dot.cases import EDGE_CASES
from ragged_dot_checks import assert_close, loop_over_groups


def _leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_gradients_equal_those_of_a_loop(case, dtype, transpose_rhs):
    torch.manual_seed(1)
    lhs = _leaf(case.m, case.k, dtype=dtype)
    rhs = _leaf(case.g, *((case.n, case.k) if transpose_rhs else (case.k, case.n)), dtype=dtype)
    upstream = torch.randn(case.m, case.n).to(dtype)
    sizes = torch.tensor(case.group_sizes, dtype=torch.int64)
    got = torch.autograd.grad(ragged_dot(lhs, rhs, sizes, transpose_rhs=transpose_rhs), (lhs, rhs), upstream)
    wanted = (
        torch.autograd.grad(
            loop_over_groups(lhs, rhs, list(case.group_sizes), transpose_rhs), (lhs, rhs), upstream.double()
        )
        if case.g
        else (torch.zeros_like(lhs), torch.zeros_like(rhs))
    )
    assert_close(got[0], wanted[0], dtype, case.n)
    assert_close(got[1], wanted[1], dtype, case.m)


def _fill_freed_memory_with_nan(like):
    blocks = [torch.full_like(like, float("nan")) for _ in range(4)]
    del blocks


@pytest.mark.parametrize("sizes", [[8, 0, 8, 0], [0, 8, 5, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_group_without_rows_gets_exactly_zero(sizes, dtype):
    x, w = _leaf(16, 64, dtype=dtype), _leaf(4, 64, 32, dtype=dtype)
    _fill_freed_memory_with_nan(w.detach())
    ragged_dot(x, w, torch.tensor(sizes)).float().sum().backward()
    assert torch.isfinite(w.grad).all()
    assert w.grad.dtype == dtype
    for group, size in enumerate(sizes):
        assert bool(w.grad[group].any()) == (size > 0)
    assert not x.grad[sum(sizes) :].any()


def test_large_uneven_groups():
    sizes = [162, 0, 2577, 446, 0, 83]
    x, w = _leaf(sum(sizes), 24), _leaf(6, 24, 8)
    _fill_freed_memory_with_nan(w.detach())
    upstream = torch.randn(sum(sizes), 8)
    dx, dw = torch.autograd.grad(ragged_dot(x, w, torch.tensor(sizes)), (x, w), upstream)
    wanted = torch.autograd.grad(loop_over_groups(x, w, sizes), (x, w), upstream.double())
    assert not dw[1].any()
    assert not dw[4].any()
    assert_close(dx, wanted[0], torch.float32, 8)
    assert_close(dw, wanted[1], torch.float32, 2577)


def test_only_what_is_asked_for_is_computed():
    from ragged_dot._bridge import record_paths

    sizes = torch.tensor([2, 2])
    for x_needs, w_needs, wanted in ((True, False, ["ragged_dot"]), (False, True, ["ragged_dot_weight_gradient"])):
        x, w = torch.randn(4, 3, requires_grad=x_needs), torch.randn(2, 3, 5, requires_grad=w_needs)
        out = ragged_dot(x, w, sizes)
        with record_paths() as ran:
            out.sum().backward()
        assert [name.partition("::")[2] for name, _ in ran] == wanted
        assert (x.grad is not None, w.grad is not None) == (x_needs, w_needs)


def test_parameters_under_no_grad_and_inference_mode():
    x, w, sizes = torch.randn(4, 3), torch.nn.Parameter(torch.randn(2, 3, 5)), torch.tensor([2, 2])
    wanted = ragged_dot(x, w, sizes).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            got = ragged_dot(x, w, sizes)
        assert torch.equal(got, wanted)
        assert not got.requires_grad


def test_gradcheck_first_and_second_order():
    x, w = _leaf(5, 3, dtype=torch.float64), _leaf(3, 3, 2, dtype=torch.float64)
    sizes = torch.tensor([2, 0, 2])
    assert torch.autograd.gradcheck(lambda x, w: ragged_dot(x, w, sizes), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: ragged_dot(x, w, sizes), (x, w))
    assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w, sizes.cumsum(0)), (x, w))
