"""Which modules a kernel may stand in for, over every RMSNorm of Transformers, and the reasons for the rest."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from layers_fakes import experts_kernel, norm_kernel
from layers_models import ids, tiny
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import pallas_hub
from pallas_hub.layers import norms, repository

FLOAT32_SCALE_MARKED = {
    # Marked as "RMSNorm" like Llama's, though they round once, after the weight.
    "AfmoeRMSNorm",
    "BeamRMSNorm",
    "DeepseekV4RMSNorm",
    "FlexOlmoRMSNorm",
    "GptOssRMSNorm",
    "NemotronHRMSNorm",
    "Olmo2RMSNorm",
    "Olmo3RMSNorm",
}
ZERO_CENTERED = {
    "GemmaRMSNorm",
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5RMSNorm",
    "T5GemmaRMSNorm",
}
NO_RMS_NORM = {
    # Their names say RMSNorm and their structure fits, but they compute something else.
    "MuseSparkTextCenteredRMSNorm",  # adds one to the weight in the weight's dtype
    "MuseSparkTextInputScaledRMSNorm",  # scales before it normalises
    "HYV4UnweightedRMSNorm",  # the reciprocal root alone
    "DeepseekV4UnweightedRMSNorm",  # rounds the root before it multiplies
}


def every_rms_norm_of_transformers():
    models = Path(transformers.__file__).parent / "models"
    for file in sorted(models.glob("*/modeling_*.py")):
        names = re.findall(r"^class (\w*RMSNorm\w*)\(", file.read_text(), re.MULTILINE)
        if names:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            for name in names:
                try:
                    yield name, getattr(module, name)(48)
                except (TypeError, AttributeError):
                    continue  # takes more than a width: one of the gated kinds


def test_every_rms_norm_of_transformers_is_told_apart():
    found = {name: norms.recognise(layer) for name, layer in every_rms_norm_of_transformers()}
    kinds = Counter(norm.layer for norm in found.values() if isinstance(norm, norms.Norm))
    assert kinds[repository.LLAMA] > 120
    assert found["LlamaRMSNorm"] == norms.Norm("RMSNorm", marked="RMSNorm")
    assert found["Llama4TextRMSNorm"] == norms.Norm("RMSNorm", marked=None)
    for name in FLOAT32_SCALE_MARKED:
        assert found[name] == norms.Norm("RMSNormFloat32Scale", marked="RMSNorm"), name
    for name in ZERO_CENTERED:
        assert found[name].layer == "RMSNormZeroCentered", name
    assert found["Gemma4RMSNorm"] == norms.Norm("RMSNormFloat32Scale", marked=None)
    assert found["IdeficsRMSNorm"] == norms.Norm("RMSNormWeightDtype", marked=None)
    for name in NO_RMS_NORM:
        assert "computes something else than the kernel" in found[name], name
    for name, norm in found.items():
        if name.endswith("Gated"):
            assert norm == "its forward takes 2 inputs (hidden_states, gate); the kernel takes one", name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: LlamaRMSNorm(40, eps=1e-5),
        lambda: Gemma3RMSNorm(40),
        lambda: Gemma4RMSNorm(40),
        lambda: Gemma4RMSNorm(40, with_scale=False),
        lambda: nn.RMSNorm(40),
        lambda: nn.RMSNorm(40, eps=1e-5),
        lambda: nn.RMSNorm(40, elementwise_affine=False),
    ],
    ids=["llama", "gemma3", "gemma4", "gemma4_no_scale", "torch", "torch_eps", "torch_no_scale"],
)
@pytest.mark.parametrize("float32_scale", [True, False], ids=["one_pass", "by_casts"])
def test_a_swapped_norm_gives_the_same_bits(make, dtype, float32_scale):
    layer = make().to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
        inputs = [torch.randn(shape).to(dtype) for shape in ((40,), (3, 40), (2, 3, 40), (1, 2, 3, 40), (0, 40))]
        inputs.append(torch.randn(40, 6).to(dtype).t())
        wanted = [layer(x) for x in inputs]
        kernel = norm_kernel(float32_scale=float32_scale)
        pallas_hub.kernelize(layer, kernels={"RMSNorm": kernel})
        kernel.calls.clear()  # kernelize tries the kernel on a small example
        for x, y in zip(inputs, wanted, strict=True):
            result = layer(x)
            assert result.dtype == y.dtype
            assert result.shape == y.shape
            if dtype == torch.float32:
                torch.testing.assert_close(result, y, rtol=1e-6, atol=1e-6)
            else:  # torch.nn.RMSNorm and a power of -0.5 may round the root another way
                assert ((result - y).abs() <= torch.finfo(dtype).eps * y.abs()).all()
    assert len(kernel.calls) == len(inputs)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma3RMSNorm, Gemma4RMSNorm], ids=lambda cls: cls.__name__)
def test_the_dtype_that_comes_out_is_that_of_the_replaced_layer(make, weight_dtype):
    layer = make(64).to(weight_dtype)
    x = torch.randn(4, 64).to(torch.bfloat16)
    with torch.no_grad():
        layer.weight.normal_()
        wanted = layer(x)
        pallas_hub.kernelize(layer, kernels={"RMSNorm": norm_kernel()})
        result = layer(x)
    assert result.dtype == wanted.dtype
    assert torch.equal(result, wanted)


class HomeMadeRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class TextScaledNorm(LlamaRMSNorm):
    """Marked through its parent, but with a forward of its own."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.5


class LoraNorm(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_B = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.base_layer(x) + x * self.lora_B


def replaced_forward():
    layer = LlamaRMSNorm(8)

    def offload_and_run(hidden_states):
        return LlamaRMSNorm.forward(layer, hidden_states)

    layer.forward = offload_and_run
    return layer


def parametrized():
    layer = LlamaRMSNorm(8)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def with_bias():
    layer = LlamaRMSNorm(8)
    layer.bias = nn.Parameter(torch.zeros(8))
    return layer


def tensor_subclass():
    class ShardedTensor(torch.Tensor):
        pass

    layer = LlamaRMSNorm(8)
    layer.weight = nn.Parameter(torch.ones(8).as_subclass(ShardedTensor))
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (HomeMadeRMSNorm, r'not in Transformers, Diffusers or torch.*use_kernel_forward_from_hub\("RMSNorm"\)'),
        (lambda: TextScaledNorm(8), r"its forward computes something else than the kernel: 100% of the values differ"),
        (replaced_forward, r"its forward was already replaced on the instance, by .*offload_and_run"),
        (parametrized, r"it holds other modules \(parametrizations\)"),
        (with_bias, r"it has tensors that are no weight: bias"),
        (tensor_subclass, r"its weight is a ShardedTensor, not a plain parameter"),
        (lambda: nn.RMSNorm((4, 8)), r"its weight has 2 dimensions; the kernel takes one"),
        (lambda: nn.RMSNorm((4, 8), elementwise_affine=False), r"it normalises over 2 dimensions; .* the last one"),
        (lambda: LlamaRMSNorm(8).double(), r"its weight is float64; the kernel takes float32, bfloat16 and float16"),
        (lambda: LlamaRMSNorm(8).to("meta"), r"its weight is on the meta device; load the model first"),
    ],
)
def test_left_alone_with_the_reason(make, reason):
    layer = make()
    before = dict(layer.__dict__)
    with pytest.warns(UserWarning, match=reason):
        report = pallas_hub.kernelize(layer, kernels={"RMSNorm": norm_kernel()})
    assert len(report) == 1
    assert not report.swapped
    assert re.search(reason, report.layers[0].reason)
    assert re.search(reason, pallas_hub.explain(layer).layers[0].reason)
    assert layer.__dict__ == before


def test_dtensor_weights_are_left_alone():
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        layer = LlamaRMSNorm(8)
        mesh = init_device_mesh("cpu", (1,))
        layer.weight = nn.Parameter(DTensor.from_local(torch.ones(8), mesh, [Replicate()]))
        assert norms.recognise(layer) == "its weight is a DTensor, not a plain parameter"
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrapper_keeps_its_own_part_around_a_swapped_layer():
    wrapped = LoraNorm(LlamaRMSNorm(8))
    x, kernel = torch.randn(3, 8), norm_kernel()
    wanted = wrapped(x)
    report = pallas_hub.kernelize(wrapped, kernels={"RMSNorm": kernel})
    assert [layer.path for layer in report.swapped] == ["base_layer"]
    kernel.calls.clear()
    torch.testing.assert_close(wrapped(x), wanted)
    assert kernel.calls == [(3, 8)]


def test_recognising_leaves_random_state_and_module_alone():
    layer = LlamaRMSNorm(24)
    layer.register_forward_hook(lambda *_: pytest.fail("a hook fired"))
    before, state = dict(layer.__dict__), torch.get_rng_state()
    weight = layer.weight.detach().clone()
    norms._FOUND.clear()
    assert norms.recognise(layer) == norms.Norm("RMSNorm", marked="RMSNorm")
    assert layer.__dict__ == before
    assert torch.equal(layer.weight, weight)
    assert torch.equal(torch.get_rng_state(), state)


def uint8(experts):
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.data.to(torch.uint8), requires_grad=False)


def lora_object(experts):
    weight = experts.gate_up_proj
    del experts._parameters["gate_up_proj"]

    class LoraWeight(nn.Module):
        def __getitem__(self, index):
            return weight[index] + 1.0

    experts.gate_up_proj = LoraWeight()


def parametrized_experts(experts):
    class AddLora(nn.Module):
        def forward(self, weight):
            return weight + 0.1

    nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", AddLora())


def own_forward(experts):
    experts.forward = lambda hidden_states, *_: hidden_states


def expert_parallel(experts):
    experts._is_expert_parallel = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (uint8, r"gate_up_proj is uint8, packed or quantised"),
        (lora_object, r"gate_up_proj is a LoraWeight, not a parameter"),
        (parametrized_experts, r"its weights are parametrized"),
        (own_forward, r"its forward was already replaced on the instance"),
        (expert_parallel, r"its experts are spread over processes"),
    ],
)
def test_experts_left_alone_keep_their_implementation_while_others_change(change, reason):
    model, kernel = tiny("qwen3_moe"), experts_kernel()
    odd = model.model.layers[0].mlp.experts
    change(odd)
    config = odd.config
    report = pallas_hub.kernelize(model, kernels={"experts": kernel, "RMSNorm": None})
    assert re.search(reason, report["model.layers.0.mlp.experts"].reason)
    assert report["model.layers.1.mlp.experts"].swapped
    assert odd.config is config
    assert config._experts_implementation == "grouped_mm"
    pallas_hub.unkernelize(model)
    assert model.config is config


def test_lora_on_expert_weights_is_in_the_result():
    """As PEFT does it: the delta is added by a parametrization for the time of the call."""
    model = tiny("qwen3_moe")
    experts = model.model.layers[0].mlp.experts

    class AddDelta(nn.Module):
        def forward(self, weight):
            return weight + delta

    torch.manual_seed(0)
    delta = torch.randn_like(experts.gate_up_proj) * 0.3

    def run():
        nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", AddDelta())
        try:
            with torch.no_grad():
                return model(ids()).logits
        finally:
            nn.utils.parametrize.remove_parametrizations(experts, "gate_up_proj", leave_parametrized=False)

    with torch.no_grad():
        plain = model(ids()).logits
    wanted, kernel = run(), experts_kernel()
    pallas_hub.kernelize(model, kernels={"experts": kernel, "RMSNorm": None})
    kernel.calls.clear()
    torch.testing.assert_close(run(), wanted, rtol=1e-4, atol=1e-5)
    assert len(kernel.calls) == 2
    assert (wanted - plain).abs().max() > 0.01


def test_experts_that_compute_something_else_are_found_out():
    model = tiny("mixtral")
    cls = type(model.model.layers[0].mlp.experts)

    class OtherGate(cls):
        def _apply_gate(self, gate_up):
            raise AssertionError("the fake kernel asks for the gate, so this class is not for it")

    for layer in model.model.layers:
        layer.mlp.experts.__class__ = OtherGate
    with pytest.warns(UserWarning, match="the kernel cannot run it: AssertionError"):
        report = pallas_hub.kernelize(model, kernels={"experts": experts_kernel(), "RMSNorm": None})
    assert not report.swapped


def test_a_kernel_that_ignores_a_bias_does_not_get_the_experts():
    model, kernel = tiny("gpt_oss"), experts_kernel()
    honest = kernel.experts_forward

    def forgetful(self, *inputs):
        self.__dict__["has_bias"] = False
        try:
            return honest(self, *inputs)
        finally:
            self.__dict__["has_bias"] = True

    kernel.experts_forward = forgetful
    with pytest.warns(UserWarning, match="it computes something else than the kernel: relative error"):
        pallas_hub.kernelize(model, kernels={"experts": kernel, "RMSNorm": None})


def test_a_kernel_that_could_not_import_something_is_tried_again():
    kernel = norm_kernel()
    forward, installed = kernel.layers.RMSNorm.forward, []

    def needs_jax(self, hidden_states):
        if not installed:
            raise ImportError("no jax here")
        return forward(self, hidden_states)

    kernel.layers.RMSNorm.forward = needs_jax
    layer = LlamaRMSNorm(48)
    assert norms.why_not(layer, kernel.layers.RMSNorm) == "the kernel cannot run it: ImportError: no jax here"
    installed.append("jax")
    assert norms.why_not(layer, kernel.layers.RMSNorm) is None
