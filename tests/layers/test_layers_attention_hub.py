"""attn_implementation="pallas-hub/flash-attention": Transformers loads the kernel by its own means, from a Hub."""

from __future__ import annotations

import copy

import pytest
import torch
from layers_hub import published
from layers_models import ids, tiny
from transformers import AutoModelForCausalLM
from transformers import modeling_flash_attention_utils as flash

NAME = "pallas-hub/flash-attention"
REFUSED = r"'pallas-hub/flash-attention' is not from a trusted publisher"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with published(tmp_path_factory.mktemp("hub"), "flash-attention") as sources:
        yield sources


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    """Transformers keeps one kernel for the whole process."""
    monkeypatch.setattr(flash, "_loaded_implementation", None)


def _with_kernel(name: str, **options):
    plain = tiny(name, **options)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(plain.config), attn_implementation=NAME).to(plain.dtype)
    model.load_state_dict(plain.state_dict())
    return plain, model.eval()


def _padded(length: int = 20):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :7] = 0
    return {"input_ids": ids(2, length), "attention_mask": mask}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "qwen3_moe"])
def test_the_model_computes_the_same(hub, name):
    plain, model = _with_kernel(name)
    assert model.config._attn_implementation == NAME
    assert "_flash_attention_v1_" in flash._flash_fn.__module__
    inputs = _padded()
    with torch.no_grad():
        wanted, came = (each(**inputs).logits[inputs["attention_mask"].bool()] for each in (plain, model))
    torch.testing.assert_close(came, wanted, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options))


def test_a_static_cache(hub):
    plain, model = _with_kernel("gemma3")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    wanted = plain.generate(**_padded(), **options)
    assert torch.equal(model.generate(**_padded(), cache_implementation="static", **options), wanted)


def test_sequences_packed_into_one_row(hub):
    plain, model = _with_kernel("llama")
    words = ids(1, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        came = model(input_ids=words, position_ids=positions).logits
        wanted = torch.cat([plain(input_ids=part).logits for part in words.split([5, 7], 1)], 1)
    torch.testing.assert_close(came, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training(hub, dtype):
    plain, model = _with_kernel("llama", dtype=dtype)
    inputs = _padded()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    for each in (plain, model):
        each.train()(**inputs, labels=labels).loss.backward()
    for (key, wanted), came in zip(plain.named_parameters(), model.parameters(), strict=True):
        scale = wanted.grad.abs().max().clamp_min(1e-3)
        assert ((came.grad - wanted.grad).abs().max() / scale).item() < (1e-4 if dtype == torch.float32 else 0.1), key


def test_dropout_of_attention_is_refused_in_training_only(hub):
    _, model = _with_kernel("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad():
        model(ids())
        with pytest.raises(ValueError, match=r"dropout_p must be 0, since no path drops attention weights; got 0\.1"):
            model.train()(ids())


def test_the_interpreted_kernel_computes_the_model(hub, monkeypatch):
    plain, model = _with_kernel("llama")
    monkeypatch.setenv("PALLAS_HUB_INTERPRET", "1")
    with torch.no_grad():
        came, wanted = (each(**_padded()).logits[_padded()["attention_mask"].bool()] for each in (model, plain))
    torch.testing.assert_close(came, wanted, rtol=1e-4, atol=1e-4)


def test_compiled_to_one_graph(hub):
    """In float32 Transformers warns at every call, which cannot be part of a graph."""
    torch._dynamo.reset()
    _, model = _with_kernel("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = model(ids(), use_cache=False).logits
        came = torch.compile(model, fullgraph=True, backend="aot_eager")(ids(), use_cache=False).logits
    torch.testing.assert_close(came, wanted, rtol=0.05, atol=0.05)


def test_models_that_list_their_kernels_do_not_take_it(hub):
    with pytest.raises(ValueError, match="'kernels-community/vllm-flash-attn3' is not from a trusted publisher"):
        tiny("gpt_oss").set_attn_implementation(NAME)


def test_a_hub_that_does_not_trust_us_wants_consent(tmp_path, tmp_path_factory, monkeypatch):
    """from_config has no way to give it. Transformers notes the name before it loads, so a second try would pass."""
    plain = tiny("llama")
    plain.save_pretrained(tmp_path)
    with published(tmp_path_factory.mktemp("untrusting"), "flash-attention", trusted=()):
        with pytest.raises(ValueError, match=REFUSED):
            AutoModelForCausalLM.from_config(copy.deepcopy(plain.config), attn_implementation=NAME)
        monkeypatch.setattr(flash, "_loaded_implementation", None)
        with pytest.raises(ValueError, match=REFUSED):
            AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
        monkeypatch.setattr(flash, "_loaded_implementation", None)
        allowed = {"attn_implementation": NAME, "allow_all_kernels": True}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **allowed).eval()
        other = copy.deepcopy(plain)
        other.set_attn_implementation(**allowed)
        with torch.no_grad():
            for each in (model, other):
                torch.testing.assert_close(each(ids()).logits, plain(ids()).logits, rtol=1e-4, atol=1e-5)
