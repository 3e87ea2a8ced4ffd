"""A tiny pipeline of each family gives the same latents with the kernel, in both ways of choosing it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from tiny_pipelines import FAMILIES, flux, ltx, qwen_image, wan

import pallas_hub

# Layers of attention, times calls of the transformer: two steps, twice that where the negative prompt is run apart.
# SD3's layers call torch's attention directly: Diffusers' setting does not reach them, kernelize does.
CALLS = {"flux": 2 * 2, "qwen-image": 2 * 4, "sd3": 3 * 2, "wan": 4 * 4, "ltx": 4 * 2}
BY_SETTING = {**CALLS, "sd3": 0}
# Float32 sums in another order, carried through two steps: some ten units in the last place of values up to 5.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_are_the_same_by_set_attention_backend(family, ran):
    tiny = FAMILIES[family]()
    wanted = tiny.latents()
    tiny.pipe.transformer.set_attention_backend("pallas")
    torch.testing.assert_close(tiny.latents(), wanted, **CLOSE)
    assert [op for op, _ in ran] == ["flash_attention::attention"] * BY_SETTING[family]
    assert wanted.std() > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_are_the_same_by_kernelize(family, ran):
    tiny = FAMILIES[family]()
    wanted = tiny.latents()
    report = pallas_hub.kernelize(tiny.pipe)
    torch.testing.assert_close(tiny.latents(), wanted, **CLOSE)
    assert [op for op, _ in ran].count("flash_attention::attention") == CALLS[family]
    assert report.left_alone == []
    assert {layer.kernel for layer in report.swapped} == {"pallas-hub/flash-attention", "pallas-hub/rms-norm"}
    assert str(report) == str(pallas_hub.explain(tiny.pipe))
    assert pallas_hub.unkernelize(tiny.pipe) is tiny.pipe
    ran.clear()
    assert torch.equal(tiny.latents(), wanted)
    assert ran == []


def test_latents_in_bfloat16_are_no_further_from_float32_than_before(ran):
    tiny = qwen_image()
    exact = tiny.latents()
    tiny.pipe.to(torch.bfloat16)
    inputs = {name: x.to(torch.bfloat16) for name, x in tiny.inputs.items() if name.endswith("embeds")}
    before = (tiny.latents(**inputs).float() - exact).abs().max()
    pallas_hub.kernelize(tiny.pipe, kernels=["attention"])
    after = (tiny.latents(**inputs).float() - exact).abs().max()
    assert len(ran) == CALLS["qwen-image"]
    assert 0 < after < 1.5 * before  # both are roundings; which is larger is chance


def test_the_mask_of_a_prompt_decides(ran):
    """Otherwise nothing above would show that masks reach the kernel: latents without them differ."""
    for family in (qwen_image, ltx):
        tiny = family()
        pallas_hub.kernelize(tiny.pipe, kernels=["attention"])
        name = next(name for name in tiny.inputs if name.endswith("mask") and not name.startswith("negative"))
        everything = torch.ones_like(tiny.inputs[name])
        assert (tiny.latents() - tiny.latents(**{name: everything})).abs().max() > 1e-3


def test_kernelize_changes_this_instance_only(ran):
    ours, theirs = flux(), flux()
    pallas_hub.kernelize(ours.pipe.transformer)
    assert _AttentionBackendRegistry.get_active_backend()[0].value == "native"
    theirs.latents()
    assert ran == []
    assert pallas_hub.explain(theirs.pipe).swapped == []
    assert pallas_hub.explain(theirs.pipe)["transformer.transformer_blocks.0.attn"].reason == "kernelize was not called"


def test_unkernelize_gives_back_the_backend_that_was_set():
    transformer = flux().pipe.transformer
    processors = [block.attn.processor for block in transformer.transformer_blocks]
    before = [dict(vars(processor)) for processor in processors]
    pallas_hub.kernelize(transformer)
    pallas_hub.unkernelize(transformer)
    assert [vars(processor) for processor in processors] == before
    transformer.set_attention_backend("flex")
    pallas_hub.kernelize(transformer)
    assert {processor._attention_backend.value for processor in processors} == {"pallas"}
    pallas_hub.unkernelize(transformer)
    assert {processor._attention_backend.value for processor in processors} == {"flex"}


def test_unkernelize_keeps_a_backend_that_was_set_meanwhile():
    transformer = flux().pipe.transformer
    pallas_hub.kernelize(transformer)
    transformer.set_attention_backend("flex")
    assert pallas_hub.explain(transformer)["transformer_blocks.0.attn"].swapped is False
    pallas_hub.unkernelize(transformer)
    assert transformer.transformer_blocks[0].attn.processor._attention_backend.value == "flex"


def test_layers_that_share_a_processor_get_it_back():
    transformer = wan().pipe.transformer
    shared = transformer.blocks[0].attn1.processor
    for block in transformer.blocks:
        block.attn1.set_processor(shared)
    pallas_hub.kernelize(transformer)
    pallas_hub.unkernelize(transformer)
    assert "_attention_backend" not in vars(shared)


def test_explain_tells_the_kernel_that_the_setting_alone_runs():
    tiny = flux()
    tiny.pipe.transformer.set_attention_backend("pallas")
    row = pallas_hub.explain(tiny.pipe)["transformer.transformer_blocks.0.attn"]
    kernel = "pallas-hub/flash-attention:scaled_dot_product_attention"
    assert str(row) == f"transformer.transformer_blocks.0.attn  FluxAttention  {kernel}, loads at its first call"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda tiny: pickle.loads(pickle.dumps(tiny))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("how", ["setting", "kernelize"])
def test_a_copy_runs_the_kernel_as_well(how, copied, ran):
    tiny = flux()
    if how == "setting":
        tiny.pipe.transformer.set_attention_backend("pallas")
    else:
        pallas_hub.kernelize(tiny.pipe, kernels=["attention"])
    wanted = tiny.latents()
    ran.clear()
    pipe = copied(tiny.pipe)
    torch.testing.assert_close(tiny._replace(pipe=pipe).latents(), wanted, **CLOSE)
    assert len(ran) == CALLS["flux"]
    assert len(pallas_hub.explain(pipe).swapped) == 2
    pallas_hub.unkernelize(pipe)
    assert len(pallas_hub.explain(tiny.pipe).swapped) == 2


def test_verify_compares_layers_on_what_the_pipeline_gives_them():
    tiny = qwen_image()
    run = {**tiny.inputs, "num_inference_steps": 1, "output_type": "latent"}
    report = pallas_hub.kernelize(tiny.pipe, verify=run)
    assert {layer.inputs for layer in report.swapped} == {"captured"}
    assert all(layer.within_tolerance for layer in report.swapped)
    assert report["transformer.transformer_blocks.0.attn"].max_rel_error is not None


def test_verify_finds_a_wrong_kernel_and_puts_the_pipeline_back(monkeypatch):
    import flash_attention

    def wrong(query, key, value, **kwargs):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)  # without the mask

    monkeypatch.setattr(flash_attention, "scaled_dot_product_attention", wrong)
    tiny = qwen_image()
    run = {**tiny.inputs, "num_inference_steps": 1, "output_type": "latent"}
    with pytest.raises(pallas_hub.layers.VerificationError, match=r"2 of 11 swapped layers differ .*blocks\.\d\.attn "):
        pallas_hub.kernelize(tiny.pipe, verify=run)
    assert pallas_hub.explain(tiny.pipe).swapped == []


def test_kernels_can_leave_attention_alone():
    report = pallas_hub.kernelize(flux().pipe, kernels={"attention": None})
    row = report["transformer.transformer_blocks.0.attn"]
    assert row.reason == "kernelize was told to leave attention layers alone"


def test_a_kernel_can_be_given(ran):
    import flash_attention

    tiny = flux()
    wanted = tiny.latents()
    report = pallas_hub.kernelize(tiny.pipe, kernels={"attention": flash_attention, "RMSNorm": None})
    assert {layer.kernel for layer in report.swapped} == {"flash_attention"}
    backend = tiny.pipe.transformer.transformer_blocks[0].attn.processor._attention_backend
    assert backend.value == "pallas:flash_attention"
    torch.testing.assert_close(tiny.latents(), wanted, **CLOSE)
    assert len(ran) == CALLS["flux"]


def test_what_is_neither_a_module_nor_a_pipeline_is_refused():
    with pytest.raises(
        TypeError, match=r"kernelize: model must be a torch.nn.Module or a Diffusers pipeline; got a dict\."
    ):
        pallas_hub.kernelize({})


@pytest.mark.parametrize(("family", "how"), [("flux", "setting"), ("sd3", "kernelize")])
def test_a_transformer_is_compiled_as_one_graph(family, how, ran):
    """And by the setting, the kernel is loaded meanwhile."""
    tiny = FAMILIES[family]()
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    wanted = tiny.latents()
    if how == "setting":
        tiny.pipe.transformer.set_attention_backend("pallas")
    else:
        pallas_hub.kernelize(tiny.pipe, kernels=["attention"])
    tiny.pipe.transformer = torch.compile(tiny.pipe.transformer, fullgraph=True, backend=backend)
    torch.testing.assert_close(tiny.latents(), wanted, **CLOSE)
    layers = CALLS[family] // 2
    assert [sum("flash_attention" in target for target in graph) for graph in graphs] == [layers]
