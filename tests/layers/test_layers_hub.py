"""The published repos, by all the ways that users put them into models: ours, the kernels library's, Transformers'."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import kernels
import pytest
import torch
from kernels import LayerRepository, Mode, use_kernel_mapping
from layers_models import ids, tiny
from transformers import AutoModelForCausalLM, KernelConfig

import pallas_hub
from pallas_hub.layers import use_loader
from pallas_hub.registry.load import get_kernel
from pallas_hub.registry.paths import OUR_SOURCES, Sources
from pallas_hub.registry.publish import publish
from pallas_hub.registry.record import record
from pallas_hub.registry.server import running_hub

ONLY_DEVICES = r"Only devices in \[.*'tpu'.*\] are supported, got: cpu"
FOR_TPU = {"RMSNorm": {"tpu": "pallas-hub/rms-norm:RMSNorm"}}


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Sources]:
    """Both kernels as the working tree has them, on a loopback Hub that this process talks to."""
    from huggingface_hub import constants

    home = tmp_path_factory.mktemp("hub")
    sources = dataclasses.replace(OUR_SOURCES, manifests=home / "manifests")
    with running_hub(home / "store", trusted=["pallas-hub"]) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "any")
        patch.setenv("PALLAS_HUB_CACHE", str(home / "builds"))
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        # kernels 0.17.2 sends a header that httpx refuses when telemetry is off.
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
        for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
            patch.delenv(name, raising=False)
        for name in ("rms-norm", "moe-experts", "ragged-dot"):
            record(name, sources)
            publish(name, sources=sources)
        yield sources


@pytest.fixture
def loader(hub):
    with use_loader(lambda repo_id, version: get_kernel(repo_id, version=version, sources=hub)):
        yield


def logits(model):
    with torch.no_grad():
        return model(ids()).logits


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "gemma4", "gpt_oss"])
def test_kernelize_with_the_published_kernels(loader, name):
    model = tiny(name)
    before = logits(model)
    report = pallas_hub.kernelize(model, verify=True)
    assert all("Router" in layer.original for layer in report.left_alone)  # which gain nothing on a CPU
    assert {(layer.kernel, layer.version, layer.source, layer.runs) for layer in report.swapped} <= {
        ("pallas-hub/rms-norm", 1, "hub", "torch"),
        ("pallas-hub/moe-experts", 1, "hub", "torch"),
    }
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    text = str(pallas_hub.explain(model))
    assert "pallas-hub/rms-norm v1:RMSNorm" in text
    assert "from hub, runs torch" in text
    pallas_hub.unkernelize(model)
    assert torch.equal(logits(model), before)


def test_ragged_dot_may_serve_the_experts_instead(loader):
    model = tiny("qwen3_moe")
    before = logits(model)
    report = pallas_hub.kernelize(model, kernels={"experts": "pallas-hub/ragged-dot", "RMSNorm": None}, verify=True)
    assert {(layer.kernel, layer.version, layer.source, layer.runs) for layer in report.swapped} == {
        ("pallas-hub/ragged-dot", 1, "hub", "torch")
    }
    assert model.config._experts_implementation == "pallas:pallas-hub/ragged-dot@1"
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4"])
def test_training_with_the_published_kernels(loader, name):
    plain, model = tiny(name).train(), tiny(name).train()
    pallas_hub.kernelize(model)
    for each in (plain, model):
        each(ids(), labels=ids()).loss.backward()
    for (key, wanted), came in zip(plain.named_parameters(), model.parameters(), strict=True):
        if wanted.grad is not None:
            scale = wanted.grad.abs().max().clamp_min(1e-4)
            assert ((came.grad - wanted.grad).abs().max() / scale).item() < 1e-4, key


def test_a_kernelized_model_compiles_to_one_graph_without_an_eager_call(loader):
    model = tiny("qwen3_moe")
    before = logits(model)
    pallas_hub.kernelize(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(ids()).logits
    torch.testing.assert_close(compiled, before, rtol=1e-4, atol=1e-5)


def test_the_interpreted_pallas_kernels_compute_the_model(loader, monkeypatch):
    model = tiny("qwen3_moe")
    before = logits(model)
    pallas_hub.kernelize(model)
    monkeypatch.setenv("PALLAS_HUB_INTERPRET", "1")
    assert {layer.runs for layer in pallas_hub.explain(model) if layer.swapped} == {"interpret"}
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE], ids=str)
def test_plain_kernelize_of_the_kernels_library(hub, mode):
    model = tiny("qwen3_moe")
    before = logits(model)
    repository = LayerRepository("pallas-hub/rms-norm", layer_name="RMSNorm", version=1)
    with use_kernel_mapping({"RMSNorm": {"cpu": repository}}, inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device="cpu")
    forward = model.model.norm.forward.__func__
    assert "_rms_norm_v1_" in forward.__module__
    assert forward is repository.load().forward
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)


def test_kernels_that_transformers_put_there_are_not_ours_to_swap(hub, loader):
    model = tiny("llama")
    repository = LayerRepository("pallas-hub/rms-norm", layer_name="RMSNorm", version=1)
    with use_kernel_mapping({"RMSNorm": {"cpu": repository}}, inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.INFERENCE, device="cpu")
    with pytest.warns(UserWarning, match=r"its forward was already replaced on the instance, by RMSNorm\.forward"):
        pallas_hub.kernelize(model)


def test_kernel_config_for_tpus_on_a_cpu(hub, tmp_path):
    """Transformers 5.22 lets a model in memory be, and refuses to load one: it forgets there for which device it is."""
    model = tiny("llama")
    before = logits(model)
    model.set_use_kernels(True, KernelConfig(FOR_TPU, inherit_mapping=False))
    assert model.kernel_config.kernel_mapping == {}
    assert model.model.norm.forward.__func__ is type(model.model.norm).forward
    assert torch.equal(logits(model), before)
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=ONLY_DEVICES):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True, kernel_config=KernelConfig(FOR_TPU))


@pytest.mark.parametrize(
    "choice",
    [
        FOR_TPU,
        {"RMSNorm": {"tpu": ("pallas-hub/rms-norm:RMSNorm", {"version": 1})}},
        {"RMSNorm": "pallas-hub/rms-norm:RMSNorm"},
    ],
    ids=["device", "device_and_version", "current_device"],
)
def test_kernel_config_with_transformers_told_that_it_is_on_a_tpu(hub, tmp_path, monkeypatch, choice):
    """Everything but the device is real: the config, the mapping, the Hub, the kernel, which then runs its CPU path."""
    tiny("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.utils.kernel_config.get_device_type", lambda device=None: "tpu")
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_device_type", lambda device=None: "tpu")
    config = KernelConfig(choice, inherit_mapping=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True, kernel_config=config).eval()
    forward = model.model.layers[0].input_layernorm.forward.__func__
    assert "_rms_norm_v1_" in forward.__module__
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)


def test_kernel_config_refuses_the_device_cpu(hub):
    with pytest.raises(ValueError, match=ONLY_DEVICES):
        tiny("llama").set_use_kernels(True, KernelConfig({"RMSNorm": {"cpu": "pallas-hub/rms-norm:RMSNorm"}}))


def test_nothing_in_this_file_reaches_another_hub(hub):
    from huggingface_hub import constants

    assert os.environ["HF_ENDPOINT"] == constants.ENDPOINT
    assert constants.ENDPOINT.startswith("http://127.0.0.1:")
