"""The workloads: rivals agree with the exact result, byte counts are right, floors move those bytes."""

import sys
import types

import pytest
import torch

from pallas_hub.bench.runner import run_case
from pallas_hub.bench.workloads import ragged_dot, rms_norm
from pallas_hub.bench.workloads.streams import _as_words, streaming_copy, streaming_read

SMALL = ragged_dot.SMALL


def experts_stand_in(hidden, gate_up_proj, down_proj, index, weights):
    """A loop in the place of the kernel: these tests are about the workload."""
    module = types.SimpleNamespace(gate_up_proj=gate_up_proj, down_proj=down_proj)
    return ragged_dot.torch_loop(module, hidden, index, weights)


def experts_case(dtype="float32", tokens=8, experts=experts_stand_in):
    kernel = types.ModuleType("experts_stand_in")
    kernel.moe_experts = experts
    (case,) = ragged_dot.cases(kernel, "small", [dtype], [tokens])
    return case


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_implementation_of_the_experts_is_right(dtype, tokens):
    result = run_case(experts_case(dtype, tokens), seconds=0.01)
    assert [row.name for row in result.rows if row.failed] == []
    assert {
        "moe_experts",
        "Transformers eager",
        "Transformers batched_mm",
        "Transformers grouped_mm",
        "torch loop",
    } == {row.name for row in result.rows if row.timing}


def test_the_slow_rivals_are_named_and_are_right():
    (case,) = ragged_dot.cases(types.ModuleType("empty"), "small", ["float32"], [3])
    assert case.unavailable.keys() == {"torch.compile of grouped_mm", "jitted JAX, no Pallas", "tokamax-ragged-dot"}
    (case,) = ragged_dot.cases(types.ModuleType("empty"), "small", ["float32"], [3], everything=True)
    assert case.unavailable == {}
    jax = ("jitted JAX, no Pallas", "tokamax-ragged-dot")
    case.implementations = [row for row in case.implementations if row.name in jax]
    assert len(case.implementations) == 2
    for row in run_case(case, seconds=0.01).rows:
        assert row.timing
        assert row.check.error < case.tolerance


def test_transformers_rows_run_what_their_name_says():
    rows = {row.name: row for row in run_case(experts_case("bfloat16"), seconds=0.01).rows}
    assert rows["Transformers grouped_mm"].path in ragged_dot._GROUPED_OPS
    assert rows["Transformers batched_mm"].path == "aten::bmm"


def test_an_expert_mixed_up_with_another_is_found():
    def mixed_up(hidden, gate_up_proj, down_proj, index, weights):
        return experts_stand_in(hidden, gate_up_proj, down_proj, (index + 1) % SMALL.experts, weights)

    result = run_case(experts_case("bfloat16", experts=mixed_up), seconds=0.01)
    assert [row.name for row in result.rows if row.failed] == ["moe_experts"]


def test_the_exact_experts_agree_with_transformers_in_float64():
    module = ragged_dot.experts_module(SMALL, torch.float64)
    hidden = torch.randn(5, SMALL.hidden, dtype=torch.float64)
    index = torch.rand(5, SMALL.experts).topk(SMALL.top_k).indices
    weights = torch.rand(5, SMALL.top_k, dtype=torch.float64)
    module.config._experts_implementation = "eager"
    torch.testing.assert_close(ragged_dot.exact_experts(module, hidden, index, weights), module(hidden, index, weights))


def test_least_bytes_of_the_experts_count_each_active_expert_once():
    case = experts_case("bfloat16", tokens=1)
    weights = SMALL.top_k * 3 * SMALL.hidden * SMALL.intermediate * 2
    routing = SMALL.top_k * (8 + 2)
    assert case.sizes["active"] == SMALL.top_k
    assert case.least_bytes == weights + 2 * SMALL.hidden * 2 + routing


@pytest.fixture
def norm_kernel(monkeypatch):
    """A module with `rms_norm` and the JAX function that the jitted row takes from `reference`."""
    kernel, reference = types.ModuleType("norm_stand_in"), types.ModuleType("norm_stand_in.reference")
    kernel.rms_norm = lambda x, weight, eps: rms_norm.exact_rms_norm(x, weight).to(x.dtype)

    def in_jax(x, weight, eps):
        wide = x.astype("float32")
        return (wide * ((wide * wide).mean(-1, keepdims=True) + eps) ** -0.5).astype(x.dtype) * weight

    reference.rms_norm = in_jax
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    monkeypatch.setitem(sys.modules, reference.__name__, reference)
    return kernel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_norm_is_right(dtype, norm_kernel):
    kernel = norm_kernel
    (case,) = rms_norm.cases(kernel, "small", [dtype], [64])
    case.implementations = [row for row in case.implementations if row.name != "torch.compile"]  # takes half a minute
    result = run_case(case, seconds=0.01)
    assert [row.name for row in result.rows if row.failed] == []
    timed = {row.name for row in result.rows if row.timing}
    assert timed == {"rms_norm", "torch F.rms_norm", "Transformers eager", "jitted JAX, no Pallas"}
    assert case.least_bytes == (2 * 64 * 128 + 128) * (4 if dtype == "float32" else 2)


def test_torch_compile_without_a_compiler_is_said(monkeypatch):
    monkeypatch.setattr(rms_norm.shutil, "which", lambda name: None)
    kernel = types.ModuleType("empty_kernel")
    (case,) = rms_norm.cases(kernel, "small", ["float32"], [1])
    assert "no reference.rms_norm" in case.unavailable["jitted JAX, no Pallas"]
    assert "needs a C++ compiler" in case.unavailable["torch.compile"]


def test_streaming_read_covers_every_byte():
    tensors = [torch.randn(7, 8).to(torch.bfloat16), torch.randn(3, 8)]
    assert [word.nbytes for word in map(_as_words, tensors)] == [t.nbytes for t in tensors]
    assert streaming_read(tensors)() is None
    assert _as_words(torch.zeros(5, dtype=torch.bfloat16)).nbytes == 8  # the odd 2 bytes are dropped


def test_streaming_copy_moves_the_source():
    source, target = torch.randn(16), torch.empty(16)
    assert torch.equal(streaming_copy(source, target)(), source)


def test_workloads_come_from_the_kernels_own_cases():
    import importlib

    from pallas_hub.bench.kernel_source import load_jax_module

    for name, module, model in (("ragged-dot", ragged_dot, "qwen3-30b-a3b"), ("rms-norm", rms_norm, "llama-3-8b")):
        package = load_jax_module(name, "cases").__name__.removesuffix(".cases")
        assert model in module.workloads(importlib.import_module(package))
        assert module.DEFAULT_WORKLOAD in module.workloads(importlib.import_module(package))
    assert rms_norm.workloads(importlib.import_module(package))["llama-3-8b"] == {
        1: 4096,
        8: 4096,
        64: 4096,
        4096: 4096,
    }


@pytest.mark.parametrize("workload", ["small", "gemma4-26b-a4b"])
def test_experts_are_called_as_in_a_model_and_all_implementations_are_right(workload, monkeypatch):
    """The class of each model with its own activation; small, so that it takes no time."""
    import moe_experts as kernel

    from pallas_hub.bench.workloads import moe_experts

    assert moe_experts.workloads(kernel).keys() == {"qwen3-30b-a3b", "gemma4-26b-a4b", "small"}
    monkeypatch.setattr(moe_experts, "workloads", lambda kernel: {workload: SMALL})
    (case,) = moe_experts.cases(kernel, workload, ["float32"], [5])
    result = run_case(case, seconds=0.01)
    assert [row.name for row in result.rows if row.failed] == []
    assert "moe_experts" in {row.name for row in result.rows if row.timing}


def test_another_activation_is_found_out(monkeypatch):
    import moe_experts as kernel

    from pallas_hub.bench.workloads import moe_experts

    other = types.ModuleType("other")
    other.experts_forward = lambda module, hidden, index, weights: kernel.moe_experts(
        hidden, module.gate_up_proj, module.down_proj, index, weights, activation="silu"
    )
    monkeypatch.setattr(moe_experts, "workloads", lambda kernel: {"gemma4-26b-a4b": SMALL})
    (case,) = moe_experts.cases(other, "gemma4-26b-a4b", ["float32"], [5])
    assert [row.name for row in run_case(case, seconds=0.01).rows if row.failed] == ["moe_experts"]
