"""quantize_experts: what it does to a model, and that whatever is done to the model before and after keeps working.

That every architecture computes the right thing with quantised experts is in tests/models/test_models_same.py.
"""

from __future__ import annotations

import copy
import io
import json
import re
import weakref
from pathlib import Path

import moe_experts
import pytest
import torch
from layers_fakes import experts_kernel
from layers_models import ids, tiny
from torch import nn

import pallas_hub
from pallas_hub.layers import NothingQuantizedWarning, use_loader
from pallas_hub.layers.experts import is_experts
from pallas_hub.layers.quantized_experts import BUFFERS, QuantizedExperts

FORMATS = tuple(moe_experts.FORMATS)
ARCHITECTURES = ("qwen3_moe", "mixtral", "gemma4", "gpt_oss")


@pytest.fixture(autouse=True)
def kernels_from_source():
    import rms_norm

    with use_loader(lambda repo_id, version: {"rms-norm": rms_norm}.get(repo_id.split("/")[1], moe_experts)):
        yield


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quantized(name: str = "qwen3_moe", format: str = "int8", **options):
    model = tiny(name, **options)
    pallas_hub.quantize_experts(model, format)
    return model


def experts_of(model) -> list:
    return [module for module in model.modules() if is_experts(module)]


def logits(model):
    with torch.no_grad():
        return model(ids()).logits


# What it does


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_report_tells_size_and_error_of_every_layer(name):
    model, plain = tiny(name), tiny(name)
    report = pallas_hub.quantize_experts(model, "int4-g32")
    assert [layer.path for layer in report] == [p for p, m in model.named_modules() if isinstance(m, QuantizedExperts)]
    assert len(report.quantized) == len(report) == 2
    for layer in report:
        new, old = model.get_submodule(layer.path), plain.get_submodule(layer.path)
        assert layer.original == type(old).__name__
        assert layer.bytes_after == sum(getattr(new, buffer).nbytes for buffer in BUFFERS)
        assert layer.bytes_before == old.gate_up_proj.nbytes + old.down_proj.nbytes
        weights = [w if old.is_transposed else w.mT for w in (old.gate_up_proj.detach(), old.down_proj.detach())]
        back = [moe_experts.dequantize(new.gate_up_data, new.gate_up_scale, weights[0].shape[1])]
        back.append(moe_experts.dequantize(new.down_data, new.down_scale, weights[1].shape[1]))
        flat, flat_back = (torch.cat([w.flatten() for w in part]) for part in (weights, back))
        assert layer.rms_error == pytest.approx(((flat - flat_back).norm() / flat.norm()).item(), rel=1e-3)
        assert layer.max_error == pytest.approx(((flat - flat_back).abs().max() / flat.abs().max()).item(), rel=1e-3)
        assert 0.05 < layer.rms_error < 0.12
    assert report.bytes_after == sum(layer.bytes_after for layer in report) < report.bytes_before / 6
    assert json.loads(report.to_json())["layers"][0]["path"] == report.layers[0].path


def test_the_report_as_text():
    report = pallas_hub.quantize_experts(tiny("qwen3_moe"), "int8")
    lines = str(report).splitlines()
    assert lines[0] == "Qwen3MoeForCausalLM: experts of 2 of 2 layers quantised to int8, 144 KiB -> 41 KiB"
    assert lines[1].startswith("  model.layers.0.mlp.experts  Qwen3MoeExperts  int8, 72 KiB -> 20.5 KiB, error rms 5.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_result_is_near_that_of_the_float_model(dtype):
    wanted = logits(tiny("qwen3_moe", dtype)).float()
    errors = {}
    for format in FORMATS:
        came = logits(quantized(format=format, dtype=dtype))
        assert came.dtype == dtype
        errors[format] = ((came.float() - wanted).norm() / wanted.norm()).item()
    assert errors["int8"] < 0.02
    assert max(errors[name] for name in errors if name.startswith("fp8")) < 0.1
    assert max(errors.values()) < 0.3


def test_float_weights_are_freed():
    model = tiny("qwen3_moe")
    weights = [weakref.ref(p.untyped_storage()) for e in experts_of(model) for p in e.parameters()]
    pallas_hub.quantize_experts(model)
    assert [ref() for ref in weights] == [None] * 4
    assert not any("experts" in name for name, _ in model.named_parameters())


def test_only_experts_change():
    model, plain = quantized("gpt_oss"), tiny("gpt_oss")
    names = set(plain.state_dict()) - set(model.state_dict())
    assert {name.rsplit(".", 1)[1] for name in names} == {"gate_up_proj", "down_proj"}
    for name, value in model.state_dict().items():
        if name.rsplit(".", 1)[1] not in BUFFERS:
            assert torch.equal(value, plain.state_dict()[name]), name
    assert {name for name, p in model.named_parameters() if "experts" in name} == {
        f"model.layers.{n}.mlp.experts.{p}_bias" for n in range(2) for p in ("gate_up_proj", "down_proj")
    }


def test_twice_changes_nothing_and_says_so():
    model = quantized()
    wanted = logits(model)
    report = pallas_hub.quantize_experts(model, "fp8")
    assert torch.equal(logits(model), wanted)
    assert [layer.format for layer in report] == ["int8", "int8"]
    assert not report.quantized
    assert "not quantised: it is already, to int8; its float weights are gone" in str(report)


def test_without_experts_it_warns():
    with pytest.warns(NothingQuantizedWarning, match=r"LlamaForCausalLM has no experts; nothing was quantised\."):
        assert len(pallas_hub.quantize_experts(tiny("llama"))) == 0


def test_what_the_kernel_cannot_take_is_left_alone_with_the_reason():
    model = tiny("qwen3_moe")
    first, second = experts_of(model)
    first.forward = lambda *inputs: inputs[0]
    report = pallas_hub.quantize_experts(model)
    assert [layer.reason for layer in report] == ["its forward was already replaced on the instance", None]
    assert report.layers[0].format is None
    assert [isinstance(module, QuantizedExperts) for module in (first, second)] == [False, True]
    assert "model.layers.0.mlp.experts  Qwen3MoeExperts  not quantised: its forward was" in str(report)
    del model.model.layers[1]
    with pytest.warns(
        NothingQuantizedWarning, match=r"none of the 1 layers of experts of .* The first, model\.layers\.0"
    ):
        pallas_hub.quantize_experts(model)


def test_what_computes_something_else_is_left_alone_and_no_other():
    model = tiny("qwen3_moe")
    experts_of(model)[0].__dict__["_apply_gate"] = lambda product: product.chunk(2, dim=-1)[0]  # its loop has its own
    report = pallas_hub.quantize_experts(model)
    assert [layer.format for layer in report] == [None, "int8"]
    assert report.layers[0].reason.startswith("it computes something else than the kernel: relative error ")


def test_an_experts_module_by_itself():
    experts = experts_of(tiny("mixtral"))[0]
    report = pallas_hub.quantize_experts(experts)
    assert report.layers[0].path == ""
    assert "(model)  MixtralExperts  int8" in str(report)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_before_anything_changes(bad):
    model = tiny("qwen3_moe")
    with torch.no_grad():
        experts_of(model)[1].down_proj[3, 1, 1] = bad
    message = (
        r"quantize_experts: weights must be finite; model\.layers\.1\.mlp\.experts\.down_proj holds NaN or infinity in "
        r"expert 3\. Nothing was quantised\."
    )
    with pytest.raises(ValueError, match=message):
        pallas_hub.quantize_experts(model)
    assert not any(isinstance(module, QuantizedExperts) for module in model.modules())


def test_an_unknown_format_is_refused():
    message = r'quantize_experts: format must be one of int8, fp8, fp8-tensor, fp8-block, int4, .*; got "int2"\.'
    with pytest.raises(ValueError, match=message):
        pallas_hub.quantize_experts(tiny("llama"), "int2")


def test_a_kernel_without_formats_is_refused():
    with (
        use_loader(lambda repo_id, version: experts_kernel()),
        pytest.raises(ValueError, match=r"must have FORMATS, quantize and dequantize; FORMATS, .* get a newer one\."),
    ):
        pallas_hub.quantize_experts(tiny("qwen3_moe"))


# Nothing runs on quantised weights that does not know them


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm", "pallas"])
def test_the_setting_of_transformers_does_not_reach_them(implementation):
    model = quantized()
    wanted = logits(model)
    model.set_experts_implementation(implementation)
    assert torch.equal(logits(model), wanted)


def test_what_reads_the_float_weights_fails():
    experts = experts_of(quantized())[0]
    with pytest.raises(AttributeError, match="has no attribute 'gate_up_proj'"):
        type(experts).__bases__[1].forward.__wrapped__(
            experts, torch.ones(1, 32), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        )


# With kernelize


def test_kernelize_before_and_after():
    wanted = logits(quantized("gpt_oss"))
    before = tiny("gpt_oss")
    configs = [module.config for module in experts_of(before)]
    pallas_hub.kernelize(before)
    pallas_hub.quantize_experts(before)
    after = quantized("gpt_oss")
    pallas_hub.kernelize(after, verify=True)
    for model in (before, after):
        torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
        rows = [row for row in pallas_hub.explain(model) if "Experts" in row.original]
        assert [(row.original, row.swapped, row.layer) for row in rows] == [
            ("QuantizedGptOssExperts", True, "experts_forward")
        ] * 2
        pallas_hub.unkernelize(model)
        assert torch.equal(logits(model), wanted)
        assert all(isinstance(module, QuantizedExperts) for module in experts_of(model))
    assert all(module.config is config for module, config in zip(experts_of(before), configs, strict=True))


def test_a_kernel_chosen_before_is_no_longer_told_nor_run():
    model, other = tiny("qwen3_moe"), experts_kernel()
    pallas_hub.kernelize(model, kernels={"experts": other, "RMSNorm": None})
    pallas_hub.quantize_experts(model)
    other.calls.clear()
    assert torch.equal(logits(model), logits(quantized()))
    assert other.calls == []
    rows = [row for row in pallas_hub.explain(model) if "Experts" in row.original]
    assert {row.kernel for row in rows} == {"pallas-hub/moe-experts"}


def test_another_kernel_for_experts_leaves_them_alone():
    model, other = quantized(), experts_kernel()
    wanted = logits(model)
    report = pallas_hub.kernelize(model, kernels={"experts": other, "RMSNorm": None})
    assert torch.equal(logits(model), wanted)
    assert other.calls == []
    assert {row.kernel for row in report if "Experts" in row.original} == {"pallas-hub/moe-experts"}


# Moves, copies, files


CASTS = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "to": lambda model: model.to(torch.float16),
    "type": lambda model: model.type(torch.float64),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("format", ["int8", "fp8-block", "int4"])
def test_casts_leave_data_and_scales_as_they_are(format, cast):
    model = quantized("gpt_oss", format)
    before = [{name: getattr(module, name).clone() for name in BUFFERS} for module in experts_of(model)]
    CASTS[cast](model)
    for module, tensors in zip(experts_of(model), before, strict=True):
        for name, tensor in tensors.items():
            now = getattr(module, name)
            assert now.dtype == tensor.dtype
            assert torch.equal(now.view(torch.uint8), tensor.view(torch.uint8))
        assert module.down_proj_bias.dtype == model.lm_head.weight.dtype != torch.float32
    assert logits(model).dtype == model.lm_head.weight.dtype


def test_moves_to_another_device():
    model = quantized("gpt_oss", "fp8").to("meta", torch.bfloat16)
    for module in experts_of(model):
        assert {getattr(module, name).device.type for name in BUFFERS} == {"meta"}
        assert [getattr(module, name).dtype for name in BUFFERS] == [torch.float8_e4m3fn, torch.float32] * 2
    empty = model.to_empty(device="cpu")
    assert {getattr(module, name).device.type for module in experts_of(empty) for name in BUFFERS} == {"cpu"}


def test_nothing_to_train():
    model = quantized().requires_grad_(True)
    for module in experts_of(model):
        assert not any(getattr(module, name).requires_grad for name in BUFFERS)


def test_a_copy_is_independent():
    model = quantized()
    wanted = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), wanted)
    experts_of(model)[0].gate_up_scale.zero_()
    assert torch.equal(logits(twin), wanted)
    assert type(experts_of(twin)[0]) is type(experts_of(model)[0])


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_saved_module_loads_with_its_kernel(format):
    experts = experts_of(quantized(format=format))[0]
    inputs = torch.randn(3, 32), torch.tensor([[0, 1], [1, 2], [7, 3]]), torch.rand(3, 2)
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.quantization_format == format
    assert torch.equal(loaded(*inputs), experts(*inputs))


@pytest.mark.parametrize("format", FORMATS)
def test_state_dict_round_trip_by_safetensors(format, tmp_path):
    from safetensors.torch import load_file, save_file

    model, fresh = quantized("gpt_oss", format), quantized("gpt_oss", format, seed=5)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert not torch.equal(logits(fresh), logits(model))
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert torch.equal(logits(fresh), logits(model))


def test_save_pretrained_writes_the_same_tensors(tmp_path):
    from safetensors.torch import load_file

    model = quantized("mixtral", "int4-g32")  # whose checkpoints hold experts one by one
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        if name.rsplit(".", 1)[1] in BUFFERS:
            (key,) = (
                key for key in saved if name.split("layers.")[1].split(".")[0] in key and key.endswith(name[-12:])
            )
            assert torch.equal(saved[key], value)


@pytest.mark.parametrize("strict", [True, False])
def test_loading_float_weights_is_refused(strict):
    model = quantized("gpt_oss")
    wanted = [getattr(module, name).clone() for module in experts_of(model) for name in BUFFERS]
    message = (
        r"model\.layers\.0\.mlp\.experts: its weights are quantised \(int8\), the state dict holds gate_up_proj, "
        r"float32 \(4, 32, 96\)\. Load float weights before quantize_experts\."
    )
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(tiny("gpt_oss").state_dict(), strict=strict)
    came = [getattr(module, name) for module in experts_of(model) for name in BUFFERS]
    assert all(torch.equal(one, other) for one, other in zip(came, wanted, strict=True))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            "fp8",
            r"gate_up_data is int8 \(8, 32, 48\); the state dict's is float8_e4m3fn \(8, 32, 48\), of another format",
        ),
        ("int4", r"gate_up_data is int8 \(8, 32, 48\); the state dict's is uint8 \(8, 16, 48\), of another format"),
    ],
    ids=["fp8", "int4"],
)
def test_loading_another_format_is_refused(other, message):
    with pytest.raises(RuntimeError, match=message):
        quantized().load_state_dict(quantized(format=other).state_dict())


def test_a_missing_tensor_is_told_by_torch():
    state = quantized().state_dict()
    del state["model.layers.0.mlp.experts.down_scale"]
    with pytest.raises(RuntimeError, match=r"Missing key.*model\.layers\.0\.mlp\.experts\.down_scale"):
        quantized().load_state_dict(state)


# Compilers, generation, training


@pytest.mark.parametrize("training", [False, True])
def test_compiles_to_one_graph(training):
    torch._dynamo.reset()
    model = quantized("qwen3_moe", "fp8-block").train(training)
    inputs = model.get_input_embeddings()(ids()).detach().requires_grad_(training)

    def run(call):
        with torch.set_grad_enabled(training):
            loss = call(inputs_embeds=inputs, labels=ids()).loss
        return loss.detach(), *(torch.autograd.grad(loss, (inputs,)) if training else ())

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one, other in zip(run(compiled), run(model), strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()


def test_generates_what_a_model_of_the_same_weights_generates():
    model, plain = quantized("qwen3_moe", "int8"), tiny("qwen3_moe")
    for new, old in zip(experts_of(model), experts_of(plain), strict=True):
        with torch.no_grad():
            old.gate_up_proj.copy_(moe_experts.dequantize(new.gate_up_data, new.gate_up_scale).mT)
            old.down_proj.copy_(moe_experts.dequantize(new.down_data, new.down_scale).mT)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids(), **options), plain.generate(ids(), **options))


def test_an_adapter_around_frozen_experts_trains():
    model = quantized("gpt_oss", "int4-g32").train().requires_grad_(False)
    projection = model.model.layers[0].self_attn.o_proj
    down, up = nn.Linear(projection.in_features, 4, bias=False), nn.Linear(4, projection.out_features, bias=False)
    nn.init.zeros_(up.weight)
    projection.register_forward_hook(lambda module, inputs, output: output + up(down(inputs[0])))
    biases = [module.down_proj_bias.requires_grad_() for module in experts_of(model)]
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters(), *biases], lr=0.02)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(bias.grad.any() for bias in biases)
    assert up.weight.grad.any()
    assert losses[-1] < 0.9 * losses[0]


DOCS = (Path(__file__).parents[2] / "docs" / "quantized-experts.md").read_text()


def test_the_snippets_of_the_docs(tmp_path, monkeypatch):
    names = {"model": tiny("mixtral"), "fresh": tiny("mixtral", seed=5)}
    monkeypatch.chdir(tmp_path)
    for snippet in re.findall(r"^```python\n(.*?)^```$", DOCS, re.DOTALL | re.MULTILINE):
        exec(compile(snippet, "quantized-experts.md", "exec"), names)
    assert torch.equal(logits(names["fresh"]), logits(names["model"]))


def test_the_table_of_the_docs():
    rows = dict(re.findall(r"^\| `([\w-]+)`.*?\| .* \| ([\d.]+ \| [\d.]+) % \|$", DOCS, re.MULTILINE))
    weight = torch.randn(1, 2048, 1536, generator=torch.Generator().manual_seed(0))
    found = {}
    for format in FORMATS:
        data, scale = moe_experts.quantize(weight, format)
        error = ((moe_experts.dequantize(data, scale) - weight).norm() / weight.norm()).item()
        found[format] = f"{(data.nbytes + scale.nbytes) * 8 / weight.numel():.2f} | {error * 100:.1f}"
    assert rows == found


# On the path of the TPU kernel


def test_the_interpreted_kernel_runs_the_layer():
    experts = experts_of(quantized("gpt_oss", "int8"))[0]
    inputs = torch.randn(2, 32), torch.tensor([[0, 1], [1, 3]]), torch.rand(2, 2)
    with torch.no_grad():
        wanted = experts(*inputs)
        with moe_experts._bridge.use_path("interpret"), moe_experts._bridge.record_paths() as ran:
            came = experts(*inputs)
    assert ran == [("moe_experts::moe_experts", "interpret")]
    torch.testing.assert_close(came, wanted, rtol=1e-4, atol=1e-5)
