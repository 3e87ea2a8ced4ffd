"""kernelize on the attention of Transformers' models: one model at a time, whatever kernels a model lists."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from layers_models import ids, tiny

import pallas_hub
from pallas_hub.layers import use_loader
from pallas_hub.layers.place import put_attention

ONLY = {"attention": "pallas-hub/flash-attention", "RMSNorm": None, "experts": None, "router": None}


@pytest.fixture(autouse=True)
def kernels_from_source():
    with use_loader(lambda repo_id, version: importlib.import_module(repo_id.split("/")[1].replace("-", "_"))):
        yield


def _padded(length: int = 24, at: str = "left"):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, slice(0, 7) if at == "left" else slice(-7, None)] = 0
    return {"input_ids": ids(2, length), "attention_mask": mask}


def _logits(model, **inputs):
    with torch.no_grad():
        logits = model(**inputs).logits
    return logits[inputs["attention_mask"].bool()] if "attention_mask" in inputs else logits


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "gpt_oss", "qwen3_moe"])
def test_the_model_computes_the_same(name):
    plain, model = tiny(name), tiny(name)
    report = pallas_hub.kernelize(model, kernels=ONLY)
    assert [row.path for row in report.swapped] == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert {(row.kernel, row.layer, row.runs) for row in report.swapped} == {
        ("pallas-hub/flash-attention", "flash_attn_func", "torch")
    }
    for inputs in (_padded(), _padded(at="right"), {"input_ids": ids(2, 24)}):
        torch.testing.assert_close(_logits(model, **inputs), _logits(plain, **inputs), rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**_padded(), **options), plain.generate(**_padded(), **options))


def test_only_this_model_changes_and_all_of_it_is_taken_back():
    shared = tiny("llama")
    model, other = shared, copy.deepcopy(shared)
    other.config = other.model.config = model.config
    before = [dict(module.__dict__) for module in model.modules()]
    wanted = _logits(model, **_padded())
    pallas_hub.kernelize(model)
    pallas_hub.kernelize(model, kernels={"attention": "pallas-hub/flash-attention"})
    assert model.config._attn_implementation == model.model.layers[0].self_attn.config._attn_implementation
    assert model.config._attn_implementation == "pallas_flash"
    assert other.config._attn_implementation == "sdpa"
    assert len(pallas_hub.explain(model).swapped) == 7
    twin = copy.deepcopy(model)
    torch.testing.assert_close(_logits(twin, **_padded()), wanted, rtol=1e-4, atol=1e-5)
    pallas_hub.unkernelize(model)
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert torch.equal(_logits(model, **_padded()), wanted)
    assert twin.config._attn_implementation == "pallas_flash"
    pallas_hub.unkernelize(twin)
    assert twin.config._attn_implementation == "sdpa"


def test_with_experts_and_norms_in_one_call():
    model = tiny("qwen3_moe")
    wanted = _logits(model, **_padded())
    report = pallas_hub.kernelize(model, kernels=["attention", "experts", "RMSNorm"], verify=True)
    assert {row.kernel for row in report.swapped} == {
        "pallas-hub/flash-attention",
        "pallas-hub/moe-experts",
        "pallas-hub/rms-norm",
    }
    torch.testing.assert_close(_logits(model, **_padded()), wanted, rtol=1e-4, atol=1e-5)
    pallas_hub.unkernelize(model)
    assert model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation != "pallas"
    assert torch.equal(_logits(model, **_padded()), wanted)


def test_on_a_cpu_only_if_it_is_asked_for():
    model = tiny("llama")
    report = pallas_hub.kernelize(model)
    assert model.config._attn_implementation == "sdpa"
    assert all("self_attn" not in row.path for row in report)


def test_where_it_will_run_on_a_tpu_without_being_asked():
    model, tpu = tiny("llama"), SimpleNamespace(type="tpu")  # torch has no such device here
    wanted = _logits(model, **_padded())
    put_attention(model, "pallas-hub/flash-attention", None, tpu, asked=False)
    assert len(pallas_hub.explain(model).swapped) == 2
    torch.testing.assert_close(_logits(model, **_padded()), wanted, rtol=1e-4, atol=1e-5)


def test_a_kernelized_model_compiles_to_one_graph():
    torch._dynamo.reset()
    model = tiny("gemma3")
    wanted = _logits(model, **_padded())
    pallas_hub.kernelize(model, kernels=ONLY)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = _padded()["attention_mask"].bool()
    with torch.no_grad():
        came = compiled(**_padded(), use_cache=False).logits[mask]
    torch.testing.assert_close(came, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_training(name):
    plain, model = tiny(name).train(), tiny(name).train()
    pallas_hub.kernelize(model, kernels=ONLY)
    inputs = _padded()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    for each in (plain, model):
        each(**inputs, labels=labels).loss.backward()
    for (key, wanted), came in zip(plain.named_parameters(), model.parameters(), strict=True):
        scale = wanted.grad.abs().max().clamp_min(1e-3)
        assert ((came.grad - wanted.grad).abs().max() / scale).item() < 1e-4, key


def test_sequences_packed_into_one_row():
    model = tiny("llama")
    words = ids(1, 12)
    wanted = torch.cat([_logits(model, input_ids=part) for part in words.split([5, 7], 1)], 1)
    pallas_hub.kernelize(model, kernels=ONLY)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    torch.testing.assert_close(_logits(model, input_ids=words, position_ids=positions), wanted, rtol=1e-4, atol=1e-5)


def test_a_static_cache():
    plain, model = tiny("gemma3"), tiny("gemma3")
    pallas_hub.kernelize(model, kernels=ONLY)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    wanted = plain.generate(**_padded(), **options)
    assert torch.equal(model.generate(**_padded(), cache_implementation="static", **options), wanted)


def test_bfloat16_and_autocast():
    plain, model = tiny("llama", dtype=torch.bfloat16), tiny("llama", dtype=torch.bfloat16)
    pallas_hub.kernelize(model, kernels=ONLY)
    torch.testing.assert_close(_logits(model, **_padded()), _logits(plain, **_padded()), rtol=0.05, atol=0.05)
    plain, model = tiny("llama"), tiny("llama")
    pallas_hub.kernelize(model, kernels=ONLY)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(_logits(model, **_padded()), _logits(plain, **_padded()), rtol=0.05, atol=0.05)


def test_a_layer_with_a_forward_of_its_own_is_left_alone():
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)
    report = pallas_hub.kernelize(model, kernels=ONLY)
    assert report["model.layers.0.self_attn"].reason == "its forward was already replaced on the instance"
    assert report["model.layers.1.self_attn"].swapped


def test_a_model_that_does_not_support_it_says_so():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=24, intermediate_size_mlp=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="does not support flash attention, whose masks it would get"):
        pallas_hub.kernelize(Llama4ForCausalLM(config), kernels=ONLY)


def test_a_paged_cache_is_refused_in_words():
    from pallas_hub.layers.attention import attention_function

    function = attention_function(importlib.import_module("flash_attention"))
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"continuous batching needs attn_implementation; got a paged cache\."):
        function(torch.nn.Identity(), q, q, q, None, cache=object())


OWN_MASK = torch.ones(24, 24, dtype=torch.bool).tril().expand(2, 1, 24, 24)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_mask_of_the_callers_own(name):
    plain, model = tiny(name), tiny(name)
    pallas_hub.kernelize(model, kernels=ONLY)
    mask = OWN_MASK & (torch.arange(24) != 3)
    mask[..., 3, 3] = True
    with torch.no_grad():
        got, wanted = (each(ids(2, 24), attention_mask=mask).logits for each in (model, plain))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_mask_of_the_callers_own_is_refused_where_there_are_sinks():
    model = tiny("gpt_oss")
    pallas_hub.kernelize(model, kernels=ONLY)
    words = r"attention_mask must be \(batch, keys\) for attention with a softcap or sinks; got \(2, 1, 24, 24\)"
    with pytest.raises(ValueError, match=words), torch.no_grad():
        model(ids(2, 24), attention_mask=OWN_MASK)


def test_verify_says_what_it_does_not_compare():
    report = pallas_hub.kernelize(tiny("llama"), kernels=["attention", "RMSNorm"], verify=True)
    compared = {row.original for row in report.swapped if not str(row).endswith(", not compared")}
    assert compared == {"LlamaRMSNorm"}
    assert {row.original for row in report.swapped} - compared == {"LlamaAttention"}
