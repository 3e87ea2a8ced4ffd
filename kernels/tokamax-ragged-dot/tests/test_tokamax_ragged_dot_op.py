"""Tokamax's ragged dot and the experts layer with it, on CPU, against float64 and against ragged-dot."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("tokamax")
import pallas_hub
from pallas_hub.registry import load_source

kernel = load_source("tokamax-ragged-dot")
ours = load_source("ragged-dot")

# Two float32 sums of the same terms in different orders.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CASES = [(10, 16, 24, (3, 0, 6, 1)), (6, 7, 5, (1, 2, 0)), (5, 8, 8, (5,)), (4, 3, 2, (0, 0))]


def arguments(m, k, n, sizes, transposed=False):
    torch.manual_seed(0)
    rhs = torch.randn(len(sizes), *((n, k) if transposed else (k, n)), requires_grad=True)
    return torch.randn(m, k, requires_grad=True), rhs, torch.tensor(sizes)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_match_float64(case, transposed):
    lhs, rhs, sizes = arguments(*case, transposed)
    with kernel._bridge.record_paths() as ran:
        got = (kernel.ragged_dot_transposed if transposed else kernel.ragged_dot)(lhs, rhs, sizes)
        upstream = torch.randn_like(got)
        grads = torch.autograd.grad(got, (lhs, rhs), upstream)
    assert [(op.rpartition("::")[2].replace("_transposed", ""), path) for op, path in ran] == [
        ("ragged_dot_cpu", "jax"),
        ("ragged_dot_cpu_backward", "jax"),
    ]
    wide = lhs.detach().double().requires_grad_(), rhs.detach().double().requires_grad_()
    wanted = ours.ragged_dot(*wide, sizes, transpose_rhs=transposed)
    wanted_grads = torch.autograd.grad(wanted, wide, upstream.double())
    for one, other in zip((got, *grads), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(one.double(), other, **CLOSE)


@pytest.mark.parametrize("case", [(0, 4, 3, (0, 0)), (4, 0, 3, (1, 2)), (4, 3, 0, (1, 2)), (4, 3, 2, ())], ids=str)
def test_empty_sizes(case):
    lhs, rhs, sizes = arguments(*case)
    got = kernel.ragged_dot(lhs, rhs, sizes.to(torch.int32))
    got.sum().backward()
    assert got.shape == (case[0], case[2])
    assert not got.any()
    assert (lhs.grad.shape, rhs.grad.shape) == (lhs.shape, rhs.shape)


def test_rows_of_no_group_touch_nothing():
    lhs, rhs, _ = arguments(6, 4, 3, (2, 2))
    lhs = torch.cat([lhs.detach()[:4], torch.full((2, 4), float("nan"))]).requires_grad_()
    got = kernel.ragged_dot(lhs, rhs, torch.tensor([2, 2]))
    got.sum().backward()
    assert not got[4:].any()
    assert not lhs.grad[4:].any()
    assert torch.isfinite(rhs.grad).all()


def test_opcheck_and_compile():
    lhs, rhs, sizes = arguments(10, 16, 24, (3, 0, 6, 1))
    torch.library.opcheck(kernel.op._ragged_dot_cpu.overload, (lhs, rhs, sizes))
    compiled = torch.compile(kernel.ragged_dot, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (10, 11):
        rows = torch.randn(m, 16)
        torch.testing.assert_close(compiled(rows, rhs, sizes), kernel.ragged_dot(rows, rhs, sizes))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lhs": torch.ones(2, 3)}, ValueError,
         r"ragged_dot: rhs must be \(g, k, n\) = \(g, 3, n\) to match lhs \(m, k\) = \(2, 3\); got \(2, 4, 5\)\."),
        ({"lhs": torch.ones(3)}, ValueError, r"ragged_dot: lhs must be \(m, k\); got \(3,\)\."),
        ({"group_sizes": torch.tensor([1])}, ValueError,
         r"ragged_dot: group_sizes must be \(g,\) = \(2,\) to match rhs \(g, k, n\) = \(2, 4, 5\); got \(1,\)\."),
        ({"lhs": torch.ones(3, 4).double()}, TypeError,
         r"ragged_dot: lhs is float64; supported: float32, bfloat16, float16\. Try lhs\.to\(torch\.float32\)\."),
        ({"group_sizes": torch.ones(2)}, TypeError, r"ragged_dot: group_sizes is float32; supported: int32, int64\."),
        ({"rhs": None}, TypeError, r"ragged_dot: rhs must be a tensor \(g, k, n\); got NoneType\."),
    ],
    ids=["k", "rank", "g", "float64", "sizes", "none"],
)  # fmt: skip
def test_rejects(change, error, message):
    given = {"lhs": torch.ones(3, 4), "rhs": torch.ones(2, 4, 5), "group_sizes": torch.tensor([1, 2])} | change
    with pytest.raises(error, match=message):
        kernel.ragged_dot(**given)


def test_without_tokamax_the_first_call_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    lhs, rhs, sizes = arguments(3, 4, 9, (1, 2))  # sizes that no other test has traced
    message = (
        r"ragged_dot: tokamax-ragged-dot runs code of the package tokamax, which .*Install it: pip install tokamax"
    )
    with pytest.raises(ImportError, match=message):
        kernel.ragged_dot(lhs, rhs, sizes)


@pytest.mark.parametrize("gate", ["concatenated", "interleaved", None])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_experts_match_ragged_dot(gate, transposed):
    torch.manual_seed(0)
    t, h, i, e = 9, 8, 6, 4
    w = i if gate is None else 2 * i
    layer = [torch.randn(t, h), torch.randn(e, w, h), torch.randn(e, h, i)]
    if transposed:
        layer[1:] = (weight.transpose(1, 2).contiguous() for weight in layer[1:])
    leaves = [tensor.requires_grad_() for tensor in layer]
    scores, index = torch.rand(t, e).softmax(-1).topk(2)
    index[0, 0] = e  # a slot that another rank serves
    options = {
        "gate": gate,
        "transposed": transposed,
        "gate_up_bias": torch.randn(e, w),
        "down_bias": torch.randn(e, h),
    }
    got, wanted = (k.moe_experts(*leaves, index, scores, **options) for k in (kernel, ours))
    torch.testing.assert_close(got, wanted, **CLOSE)
    upstream = torch.randn_like(got)
    for one, other in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_experts_reject_float64():
    wide = torch.ones(2, 4).double(), torch.ones(3, 6, 4).double(), torch.ones(3, 4, 3).double()
    with pytest.raises(
        TypeError, match=r"moe_experts: hidden_states is float64; supported: float32, bfloat16, float16"
    ):
        kernel.moe_experts(*wide, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


def test_experts_under_autocast_multiply_in_its_dtype():
    torch.manual_seed(0)
    layer = torch.randn(5, 8), torch.randn(3, 12, 8), torch.randn(3, 8, 6)
    index, scores = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]]), torch.rand(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = (k.moe_experts(*layer, index, scores) for k in (kernel, ours))
    assert got.dtype == torch.float32
    # One rounding to bfloat16 more or less in each of two products.
    torch.testing.assert_close(got, wanted, rtol=4 * torch.finfo(torch.bfloat16).eps, atol=0.1)


def test_a_model_runs_it_in_place_of_ours():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads)).eval()
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        wanted = model(tokens).logits
        pallas_hub.kernelize(model, kernels={"experts": "pallas-hub/tokamax-ragged-dot", "RMSNorm": None})
        with kernel._bridge.record_paths() as ran:
            got = model(tokens).logits
    assert [op.rpartition("::")[2] for op, _ in ran] == ["ragged_dot_transposed_cpu"] * 2
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_on_tpu_tokamax_s_kernel_is_lowered():
    """With fake tensors of torch_tpu: the op for TPUs lowers Tokamax's Pallas kernel, forward and backward."""
    pytest.importorskip("torch_tpu")
    script = """
        import logging, sys, warnings
        import torch
        import torch_tpu._loader
        torch_tpu._loader._init_device("tpu")
        from torch._subclasses.fake_tensor import FakeTensorMode
        from pallas_hub.registry import load_source
        kernel = load_source("tokamax-ragged-dot")
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        log = logging.getLogger(kernel.__name__ + "._tokamax")
        log.addHandler(handler); log.setLevel(logging.INFO)
        warnings.simplefilter("ignore")
        def empty(*shape, dtype=torch.bfloat16): return torch.empty(*shape, dtype=dtype, device="tpu")
        with FakeTensorMode(), torch.no_grad():
            for m, k, n in ((256, 256, 384), (8, 256, 128), (8, 16, 24)):
                x, w, sizes = empty(m, k), empty(4, k, n), empty(4, dtype=torch.int32)
                y = kernel.ragged_dot(x, w, sizes.long())
                assert y.shape == (m, n) and y.device.type == "tpu", y
                op = kernel.op._ragged_dot_tpu
                assert op.tpu_op._abstract_fn(x, w, sizes).shape == (m, n)
                grads = op.backward_op.tpu_op._abstract_fn(x, w, sizes, y, 3)
                assert [g.shape for g in grads[:2]] == [(m, k), (4, k, n)], grads
        took = [line.partition(" runs ")[2][:6] for line in lines]
        assert took == ["mosaic"] * 4 + ["xla, s"] * 2, lines
        print("lowered for tpu")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert "lowered for tpu" in done.stdout, done.stderr[-3000:]
