"""Training and evaluation may alternate after the swap: no gradient is lost, and evaluation runs the kernel."""

from __future__ import annotations

import logging

import pytest
import torch
from kernels import Mode
from layers_fakes import experts_kernel, fakes, norm_kernel
from layers_models import ids, tiny
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import pallas_hub
from pallas_hub.layers import place, repository


def calls(kernels) -> int:
    total = sum(len(kernel.calls) for kernel in kernels.values())
    for kernel in kernels.values():
        kernel.calls.clear()
    return total


def gradients(model):
    model.zero_grad()
    model(ids(), labels=ids()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("training_at_swap", [True, False], ids=["swapped_in_train", "swapped_in_eval"])
def test_a_kernel_without_backward_runs_in_evaluation_only(name, training_at_swap):
    model, kernels = tiny(name).train(training_at_swap), fakes(differentiable=False)
    model.train()
    wanted = gradients(model)
    model.train(training_at_swap)
    pallas_hub.kernelize(model, kernels=kernels)
    calls(kernels)
    for _ in range(2):
        model.train()
        came = gradients(model)
        assert calls(kernels) == 0
        assert came.keys() == wanted.keys()
        for key, gradient in wanted.items():
            torch.testing.assert_close(came[key], gradient, rtol=1e-4, atol=1e-6)
        model.eval()
        with torch.no_grad():
            model(ids())
        assert calls(kernels) == len(pallas_hub.explain(model).swapped)
    with torch.inference_mode():
        model(ids())
    assert calls(kernels) > 0


@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma3RMSNorm], ids=lambda cls: cls.__name__)
def test_a_gradient_asked_for_in_evaluation_is_not_lost(make):
    layer, kernel = make(8).eval(), norm_kernel(differentiable=False)
    pallas_hub.kernelize(layer, kernels={"RMSNorm": kernel})
    kernel.calls.clear()
    x = torch.randn(2, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert kernel.calls == []


def test_the_user_is_told_once(caplog):
    place._TOLD.clear()
    with caplog.at_level(logging.WARNING, logger="pallas_hub.layers.place"):
        for _ in range(2):
            pallas_hub.kernelize(tiny("llama").train(), kernels={"RMSNorm": norm_kernel(differentiable=False)})
    assert [r.message for r in caplog.records if "has no backward" in r.message] == [
        "kernelize: fake_rms_norm has no backward: wherever gradients are needed the original layer runs; the kernel "
        "runs in evaluation under torch.no_grad() or torch.inference_mode()."
    ]


@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma3RMSNorm], ids=lambda cls: cls.__name__)
def test_a_kernel_without_backward_is_compiled_with_the_original_in_training(make):
    layer, kernel, x = make(8).train(), norm_kernel(differentiable=False), torch.randn(2, 8)
    pallas_hub.kernelize(layer, kernels={"RMSNorm": kernel})
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x).square().sum().backward()
    came, layer.weight.grad = layer.weight.grad, None
    make.forward(layer, x).square().sum().backward()
    torch.testing.assert_close(came, layer.weight.grad)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), make.forward(layer, x))


def test_a_kernel_that_cannot_be_compiled_steps_aside_in_a_graph():
    layer = LlamaRMSNorm(8).eval()
    kernel = norm_kernel(compilable=False)
    pallas_hub.kernelize(layer, kernels={"RMSNorm": kernel})
    kernel.calls.clear()
    x = torch.randn(2, 8)
    with torch.no_grad():
        layer(x)
        assert kernel.calls == [(2, 8)]
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))
    assert repository.guarded(kernel.layers.RMSNorm).can_torch_compile


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        (Mode.TRAINING, {"differentiable": False}, "the kernel has no backward and mode is TRAINING"),
        (
            Mode.INFERENCE | Mode.TORCH_COMPILE,
            {"compilable": False},
            "the kernel does not support torch.compile and mode has TORCH_COMPILE",
        ),
    ],
)
@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma3RMSNorm], ids=lambda cls: cls.__name__)
def test_a_fixed_mode_turns_down_a_kernel_that_cannot_serve_it(make, mode, options, reason):
    layer = make(8)
    with pytest.warns(UserWarning, match=reason):
        report = pallas_hub.kernelize(layer, mode=mode, kernels={"RMSNorm": norm_kernel(**options)})
    assert report.layers[0].reason == reason
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE], ids=str)
def test_a_fixed_mode_swaps_what_can_serve_it(mode):
    model, kernels = tiny("qwen3_moe"), fakes()
    assert len(pallas_hub.kernelize(model, mode=mode, kernels=kernels).swapped) == 11


def test_forward_only_experts_are_turned_down_for_training():
    model = tiny("mixtral")
    kernels = {"RMSNorm": norm_kernel(), "experts": experts_kernel(differentiable=False)}
    report = pallas_hub.kernelize(model, mode=Mode.TRAINING, kernels=kernels)
    assert report["model.layers.0.mlp.experts"].reason == "the kernel has no backward and mode is TRAINING"
    assert report["model.norm"].swapped
    assert model.config._experts_implementation == "grouped_mm"
