"""A kernelized model computes what it computed before: values, gradients, generated tokens; undo leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from layers_fakes import fakes
from layers_models import NAMES, ids, tiny

import pallas_hub
from pallas_hub.layers import experts, norms

# Experts are added up in another order than Transformers does it: a few units in the last place, through two layers.
RTOL = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def close(a, b, dtype=torch.float32):
    scale = b.detach().abs().max().clamp_min(1e-6)
    assert ((a - b).abs().max() / scale).item() <= RTOL[dtype]


def kinds(model):
    return [module for module in model.modules() if norms.is_norm(module) or experts.is_experts(module)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_as_before_and_every_layer_runs_a_kernel(name, dtype):
    model, kernels = tiny(name, dtype), fakes()
    with torch.no_grad():
        before = model(ids()).logits
        report = pallas_hub.kernelize(model, kernels=kernels)
        for kernel in kernels.values():
            kernel.calls.clear()
        after = model(ids()).logits
    assert after.dtype == before.dtype
    close(after.float(), before.float(), dtype)
    assert len(report.swapped) == len(kinds(model))
    assert all("Router" in layer.original for layer in report.left_alone)  # which gain nothing on a CPU
    assert len(kernels["RMSNorm"].calls) == sum(norms.is_norm(module) for module in model.modules())
    assert len(kernels["experts"].calls) == sum(experts.is_experts(module) for module in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_norms_alone_change_nothing_in_bfloat16(name):
    model = tiny(name, torch.bfloat16)
    with torch.no_grad():
        before = model(ids()).logits
        pallas_hub.kernelize(model, kernels={"RMSNorm": fakes()["RMSNorm"], "experts": None})
        assert torch.equal(model(ids()).logits, before)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_as_before(name):
    model = tiny(name).train()

    def step():
        model.zero_grad()
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        return loss, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    loss, gradients = step()
    pallas_hub.kernelize(model, kernels=fakes())
    swapped_loss, swapped_gradients = step()
    close(swapped_loss, loss)
    assert swapped_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        scale = gradient.abs().max().clamp_min(1e-4)
        assert ((swapped_gradients[key] - gradient).abs().max() / scale).item() <= 1e-4, key


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "gpt_oss"])
def test_generates_the_same_tokens(name):
    model = tiny(name)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids()), "pad_token_id": 0}
    before = model.generate(ids(), **options)
    pallas_hub.kernelize(model, kernels=fakes())
    assert torch.equal(model.generate(ids(), **options), before)


@pytest.mark.parametrize("name", NAMES)
def test_undo_leaves_every_instance_as_it_was(name):
    model = tiny(name)
    dictionaries = [(module, dict(module.__dict__)) for module in model.modules()]
    config = copy.deepcopy(model.config)
    implementations = model.get_experts_implementation()
    pallas_hub.kernelize(model, kernels=fakes())
    assert any(module.__dict__ != was for module, was in dictionaries)
    pallas_hub.unkernelize(model)
    for module, was in dictionaries:
        assert list(module.__dict__) == list(was)
        assert all(module.__dict__[key] is was[key] for key in was)
    assert model.config == config
    assert model.get_experts_implementation() == implementations


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "gpt_oss"])
def test_compiles_to_one_graph(name):
    model = tiny(name)
    with torch.no_grad():
        pallas_hub.kernelize(model, kernels=fakes())
        expected = model(ids()).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        close(compiled(ids()).logits, expected)
