"""What the user is told: a report of every layer, a warning for nothing, and verification that finds a wrong kernel."""

from __future__ import annotations

import json

import pytest
import torch
from layers_fakes import experts_kernel, fakes, norm_kernel
from layers_models import ids, tiny
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import pallas_hub
from pallas_hub.layers import NothingSwapped, NothingSwappedWarning, Report, VerificationError, state, use_loader


def untouched(model) -> bool:
    return not any(state.RECORD in m.__dict__ or "forward" in m.__dict__ for m in model.modules())


def test_nothing_to_swap_is_a_warning_and_strictly_an_error():
    model = nn.Sequential(nn.Linear(4, 4))
    message = (
        "kernelize: Sequential has no RMSNorm layer, no experts, no router and no attention of Diffusers; "
        "nothing was swapped."
    )
    with pytest.warns(NothingSwappedWarning, match=message):
        report = pallas_hub.kernelize(model, kernels=fakes())
    assert len(report) == 0
    with pytest.raises(NothingSwapped, match=message):
        pallas_hub.kernelize(model, kernels=fakes(), strict=True)


def test_nothing_swapped_names_the_first_layer_and_its_reason():
    model = nn.Sequential(LlamaRMSNorm(8).double())
    message = (
        r"kernelize: none of the 1 layers of Sequential that a kernel could serve was swapped\. "
        r"The first, 0: its weight is float64; .*print\(explain\(model\)\) lists all\."
    )
    with pytest.raises(NothingSwapped, match=message):
        pallas_hub.kernelize(model, kernels=fakes(), strict=True)


def test_report_is_data():
    model = tiny("qwen3_moe")
    report = pallas_hub.kernelize(model, kernels=fakes())
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["model"] == "Qwen3MoeForCausalLM"
    assert (data["swapped"], len(data["layers"])) == (11, 13)  # two routers, which stay as they are on a CPU
    assert data["layers"][0] == {
        "path": "model.layers.0.self_attn.q_norm",
        "original": "Qwen3MoeRMSNorm",
        "swapped": True,
        "kernel": "fake_rms_norm",
        "layer": "RMSNorm",
        "version": None,
        "source": "module",
        "loaded": True,
        "runs": None,
        "reason": None,
        "inputs": None,
        "max_abs_error": None,
        "max_rel_error": None,
        "tolerance": None,
    }
    with pytest.raises(KeyError, match="nowhere"):
        report["nowhere"]


def test_explain_prints_one_line_for_each_layer():
    model = tiny("qwen3_moe")
    lines = str(pallas_hub.explain(model)).splitlines()
    assert lines[0] == "Qwen3MoeForCausalLM: 0 of 13 layers run Hub kernels"
    assert lines[1] == "  model.layers.0.self_attn.q_norm  Qwen3MoeRMSNorm  original: kernelize was not called"
    pallas_hub.kernelize(model, kernels={**fakes(), "experts": None})
    lines = str(pallas_hub.explain(model)).splitlines()
    assert lines[0] == "Qwen3MoeForCausalLM: 9 of 13 layers run Hub kernels"
    assert "  model.norm  Qwen3MoeRMSNorm  fake_rms_norm:RMSNorm from module, runs None" in lines
    assert (
        "  model.layers.0.mlp.experts  Qwen3MoeExperts  original: kernelize was told to leave experts layers alone"
        in lines
    )
    assert isinstance(pallas_hub.explain(model), Report)


def test_kernels_can_be_chosen_by_kind(fresh_pallas):
    model, kernels = tiny("qwen3_moe"), fakes()
    loaded = []

    def loader(repo_id, version):
        loaded.append((repo_id, version))
        return kernels["RMSNorm" if "norm" in repo_id else "experts"]

    with use_loader(loader):
        assert len(pallas_hub.kernelize(model).swapped) == 11
        assert model.config._experts_implementation == "pallas"
        assert len(pallas_hub.kernelize(model, kernels=["RMSNorm"]).swapped) == 9
        report = pallas_hub.kernelize(model, kernels={"RMSNorm": "acme/norms@3", "experts": None})
    assert loaded == [
        ("pallas-hub/rms-norm", None),
        ("pallas-hub/moe-experts", None),
        ("pallas-hub/rms-norm", None),
        ("acme/norms", 3),
    ]
    assert (report["model.norm"].kernel, report["model.norm"].version) == ("acme/norms", 3)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (
            ["LayerNorm"],
            r"kernels names kinds of layers, each one of RMSNorm, experts, attention, router; got 'LayerNorm'",
        ),
        ({"rmsnorm": None}, r"each one of RMSNorm, experts, attention, router; got 'rmsnorm'"),
        ({"RMSNorm": "rms-norm"}, r'a kernel is "org/name" or "org/name@version"; got \'rms-norm\''),
        ({"RMSNorm": experts_kernel()}, r"kernel fake_ragged_dot must have rms_norm; it has: calls, experts_forward"),
    ],
)
def test_a_wrong_choice_of_kernels_is_refused_and_nothing_changes(kernels, message):
    model = tiny("llama")
    with pytest.raises(ValueError, match=message):
        pallas_hub.kernelize(model, kernels=kernels)
    assert untouched(model)


def test_a_kernel_that_cannot_be_loaded_leaves_the_model_as_it_was():
    model = tiny("qwen3_moe")

    def loader(repo_id, version):
        if "experts" in repo_id:
            raise OSError("no route to host")
        return norm_kernel()

    with use_loader(loader), pytest.raises(OSError, match="no route to host"):
        pallas_hub.kernelize(model)
    assert untouched(model)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_measures_every_layer_on_its_own_inputs(name, dtype):
    model = tiny(name, dtype).train()
    state_before = torch.get_rng_state()
    report = pallas_hub.kernelize(model, kernels=fakes(), verify=True)
    assert torch.equal(torch.get_rng_state(), state_before)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert all(layer.inputs == "captured" and layer.max_rel_error <= layer.tolerance for layer in report.swapped)
    worst = report.largest_error
    assert worst.max_rel_error == max(layer.max_rel_error for layer in report.swapped)
    assert str(report).splitlines()[-1] == f"  largest error: {worst.max_rel_error:.1e} in {worst.path}"


def test_verify_takes_the_users_inputs():
    seen = []
    for inputs in (ids(3, 5), (ids(3, 5),), {"input_ids": ids(3, 5)}):
        model, kernels = tiny("llama"), fakes()
        report = pallas_hub.kernelize(model, kernels=kernels, verify=inputs)
        assert {layer.inputs for layer in report} == {"captured"}
        seen.append([shape for shape in kernels["RMSNorm"].calls if shape == (3, 5, 32)])
    assert [len(shapes) for shapes in seen] == [5, 5, 5]


def test_verify_falls_back_to_random_inputs_for_layers_that_are_not_reached():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = LlamaRMSNorm(8), LlamaRMSNorm(8)

        def forward(self, x):
            return self.used(x)

    report = pallas_hub.kernelize(Spare(), kernels=fakes(), verify=torch.randn(2, 8))
    assert [(layer.path, layer.inputs) for layer in report] == [("used", "captured"), ("spare", "random")]
    report = pallas_hub.kernelize(tiny("qwen3_moe").model.layers[0], kernels=fakes(), verify=True)
    assert {layer.inputs for layer in report.swapped} == {"random"}
    assert len(report.swapped) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_names_the_layer_that_is_wrong_and_puts_the_model_back(dtype):
    model = tiny("qwen3_moe", dtype)
    before = model(ids()).logits
    kernels = {"RMSNorm": norm_kernel(wrong_by=0.05), "experts": None}
    message = (
        r"kernelize: 9 of 9 swapped layers differ from the original by more than rounding explains\. Largest: "
        r"model\.layers\.\d\.\w+(\.\w+)? \(Qwen3MoeRMSNorm, fake_rms_norm\): relative error \d.*, tolerance .*, "
        r"captured inputs\. The model was put back"
    )
    with pytest.raises(VerificationError, match=message):
        pallas_hub.kernelize(model, kernels=kernels, verify=True)
    assert untouched(model)
    assert torch.equal(model(ids()).logits, before)


@pytest.mark.parametrize("in_place", [False, True])
def test_verify_does_not_compile_a_compiled_model(in_place):
    compilations = CompileCounter()
    model = tiny("llama")
    compiled = model if in_place else torch.compile(model, backend=compilations)
    if in_place:
        model.compile(backend=compilations)
    report = pallas_hub.kernelize(compiled, kernels=fakes(), verify=True)
    assert {layer.inputs for layer in report.swapped} == {"captured"}
    assert compilations.frame_count == 0
    with torch.no_grad():
        compiled(ids())
    assert compilations.frame_count > 0


def test_verify_finds_a_kernel_that_returns_nan():
    with pytest.raises(VerificationError, match=r"1 of 1 swapped layers differ.*relative error nan"):
        pallas_hub.kernelize(LlamaRMSNorm(8), kernels={"RMSNorm": norm_kernel(wrong_by=float("nan"))}, verify=True)


def test_verify_with_inputs_that_the_model_refuses_says_so():
    model = tiny("llama")
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        pallas_hub.kernelize(model, kernels=fakes(), verify={"no_such_input": 1})
    assert untouched(model)
