"""Values and gradients of moe_experts on every path of the CPU, which op runs when, and that torch accepts it."""

from dataclasses import replace

import moe_experts as package
import pytest
import torch
from moe_experts import moe_experts
from moe_experts._bridge import record_paths, use_path
from moe_experts._ragged_dot import moe_experts as composition
from moe_experts.cases import EDGE_CASES, Case
from moe_experts.checks import NAMES
from moe_experts.op import _fused
from moe_experts_torch import assert_close, call_of, exact, loop_over_tokens

FUSED, PRODUCT = "moe_experts::moe_experts", "moe_experts__ragged_dot::ragged_dot"
SMALL = Case(5, 16, 12, 16, 2)
OSS = replace(SMALL, activation="swiglu_oss", gate="interleaved", limit=1.5, bias=True, transposed=True, routed=20)


def test_public_names():
    assert package.__all__ == [
        "FORMATS",
        "dequantize",
        "experts_forward",
        "layers",
        "moe_experts",
        "quantize",
        "router_topk",
    ]
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_equals_a_loop(case, dtype):
    arguments, names = call_of(case, dtype)
    got = moe_experts(*arguments, **names)
    assert got.shape == (case.t, case.h)
    assert got.dtype == dtype
    if dtype in (torch.bfloat16, torch.float16):  # rounded inputs: the loop has to see the same
        wide = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in names.items()}
        inputs = [part.double() if part.is_floating_point() else part for part in arguments]
        assert_close(got, case, loop_over_tokens(*inputs, **wide), dtype)
    else:
        assert_close(got, case, exact(case))


@pytest.mark.parametrize("case", [EDGE_CASES[1], EDGE_CASES[3], EDGE_CASES[5]], ids=lambda case: case.id)
def test_the_interpreted_kernel_gives_the_same(case):
    arguments, names = call_of(case)
    with use_path("interpret"), record_paths() as ran:
        got = moe_experts(*arguments, **names)
    assert ran == [(FUSED, "interpret")]
    assert_close(got, case, exact(case))


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("gate", ["concatenated", "interleaved", None])
@pytest.mark.parametrize("limit", [None, 0.8])
def test_every_name_on_both_torch_paths(activation, gate, limit):
    if gate is None and (limit or activation == "swiglu_oss"):
        return
    case = replace(SMALL, activation=activation, gate=gate or "none", limit=limit, bias=True)
    arguments, names = call_of(case)
    assert_close(moe_experts(*arguments, **names), case, exact(case))
    biases = (names["gate_up_bias"], names["down_bias"])
    assert_close(_fused(*arguments, *biases, None, None, activation, gate or "none", limit, False), case, exact(case))


@pytest.mark.parametrize("case", [SMALL, OSS, replace(SMALL, gate="none", activation="relu2")], ids=lambda c: c.id)
def test_gradients_equal_those_of_a_loop(case):
    arguments, names = call_of(case)
    leaves = {i: part.requires_grad_() for i, part in enumerate(arguments) if part.is_floating_point()}
    biases = [value.requires_grad_() for value in (names["gate_up_bias"], names["down_bias"]) if value is not None]
    inputs = [*leaves.values(), *biases]
    with record_paths() as ran:
        got = moe_experts(*arguments, **names)
    assert ran == [(PRODUCT, "torch")] * 2
    wanted = loop_over_tokens(*arguments, **names)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    wanted_grads = torch.autograd.grad(wanted, inputs, upstream, materialize_grads=True)
    grads = torch.autograd.grad(got, inputs, upstream)
    for one, other in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    unused = sorted(set(range(case.e)) - set(arguments[3].flatten().tolist()))
    assert unused
    assert not any(grad[unused].any() for grad in grads[1:3])


def _ops(call, path="interpret"):
    with use_path(path), record_paths() as ran:
        call()
    return [op for op, _ in ran]


def test_which_op_runs():
    arguments, names = call_of(Case(2, 8, 4, 3, 1))
    x, *others = arguments
    fused, composed = [FUSED], [PRODUCT, PRODUCT]
    assert _ops(lambda: moe_experts(*arguments, **names), "auto") == composed  # on CPU
    assert _ops(lambda: moe_experts(*arguments, **names)) == fused
    assert (
        _ops(lambda: moe_experts(*(part.bfloat16() if part.is_floating_point() else part for part in arguments)))
        == fused
    )
    assert (
        _ops(lambda: moe_experts(*(part.half() if part.is_floating_point() else part for part in arguments)))
        == composed
    )
    assert _ops(lambda: moe_experts(x.clone().requires_grad_(), *others)) == composed
    with torch.no_grad():
        assert _ops(lambda: moe_experts(x.clone().requires_grad_(), *others)) == fused
    with torch.autocast("cpu", torch.bfloat16):
        assert _ops(lambda: moe_experts(*arguments)) == composed
    for functions in ({"activation": torch.tanh}, {"gate": lambda y: y[:, :4]}, {"output_norm": torch.tanh}):
        assert _ops(lambda functions=functions: moe_experts(*arguments, **functions)) == composed
    double = [part.double() if part.is_floating_point() else part for part in arguments]
    assert _ops(lambda: moe_experts(*double), "torch") == composed


@pytest.mark.parametrize("missing", ["gate_up_bias", "down_bias"])
def test_one_bias_alone(missing):
    case = replace(SMALL, bias=True, transposed=True)
    arguments, names = call_of(case)
    names[missing] = None
    wanted = loop_over_tokens(*arguments, **names)
    for path in ("torch", "interpret"):
        with use_path(path):
            torch.testing.assert_close(moe_experts(*arguments, **names), wanted, rtol=1e-4, atol=1e-5)


def test_without_a_limit_it_is_what_ragged_dot_calls_moe_experts():
    """The names that both have mean the same, to the last bit where the same code runs."""
    arguments, _ = call_of(EDGE_CASES[2])
    for gate in ("concatenated", "interleaved"):
        assert torch.equal(moe_experts(*arguments, gate=gate), composition(*arguments, gate=gate))


def test_weights_that_are_not_contiguous():
    arguments, names = call_of(EDGE_CASES[1])
    x, gate_up, down, index, scores = arguments
    strided = (x.t().contiguous().t(), gate_up.mT.contiguous().mT, torch.stack([down, down], -1)[..., 0], index, scores)
    for path in ("torch", "interpret"):
        with use_path(path):
            assert_close(moe_experts(*strided, **names), EDGE_CASES[1], exact(EDGE_CASES[1]))


@pytest.mark.parametrize("path", ["torch", "interpret"])
def test_no_tokens(path):
    arguments, names = call_of(replace(SMALL, t=0))
    with use_path(path):
        assert moe_experts(*arguments, **names).shape == (0, 16)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_wide_weights_of_narrow_hidden_states(wide):
    (x, gate_up, down, index, scores), _ = call_of(SMALL, torch.bfloat16)
    with use_path("interpret"):
        got = moe_experts(x, gate_up, down, index.long(), scores.to(wide))
        assert torch.equal(got, moe_experts(x, gate_up, down, index, scores))
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("case", "dtype"), [(SMALL, torch.float32), (OSS, torch.bfloat16)], ids=["float32", "bfloat16"]
)
def test_opcheck(case, dtype):
    arguments, names = call_of(case, dtype)
    attributes = (None, None, case.activation, case.gate, case.limit, case.transposed)
    torch.library.opcheck(_fused.overload, (*arguments, names["gate_up_bias"], names["down_bias"], *attributes))
