"""Whatever dispatch_attention_fn passes to torch's attention, the backend "pallas" takes too, with the same result."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, dispatch_attention_fn
from torch.nn.attention.flex_attention import create_block_mask

LK = 5
BOOLS = torch.rand(2, 1, 4, LK, generator=torch.Generator().manual_seed(3)) > 0.4
BOOLS[..., 0] = True  # no row without a key: there torch gives NaN on some paths and 0 on others


def qkv(lq: int = 4, lk: int = LK, heads: int = 2, kv_heads: int = 2, d: int = 8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, lq, heads, d), (2, lk, kv_heads, d), (2, lk, kv_heads, d))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "keys": {"attn_mask": BOOLS[:, 0, 0]},  # (batch, keys)
    "rows and keys": {"attn_mask": BOOLS[0, 0]},
    "bools": {"attn_mask": BOOLS},
    "bools for every head": {"attn_mask": BOOLS.expand(2, 2, 4, LK)},
    "floats": {"attn_mask": torch.randn(2, 2, 4, LK)},
    "floats of keys": {"attn_mask": torch.zeros(2, 1, 1, LK).masked_fill(~BOOLS[:, :, :1], -1e4)},
    "causal": {"is_causal": True},
    "dropout of 0": {"dropout_p": 0.0},
}


@pytest.mark.parametrize("case", CASES)
def test_result_and_gradients_are_those_of_native(case, ran):
    inputs = qkv()
    wanted = dispatch_attention_fn(*inputs, **CASES[case], backend="native")
    came = dispatch_attention_fn(*inputs, **CASES[case], backend="pallas")
    assert [op for op, _ in ran] == ["flash_attention::attention"]
    torch.testing.assert_close(came, wanted, rtol=1e-5, atol=1e-5)
    dout = torch.randn(wanted.shape)
    grads = torch.autograd.grad(came, inputs, dout)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, inputs, dout), rtol=1e-4, atol=1e-5)


def test_the_checks_of_diffusers_are_those_of_native(monkeypatch):
    monkeypatch.setattr(_AttentionBackendRegistry, "_checks_enabled", True)
    q, k, v = qkv()
    dispatch_attention_fn(q, k, v, attn_mask=BOOLS, backend="pallas")
    with pytest.raises(ValueError, match="must have the same sequence length"):
        dispatch_attention_fn(q, k, v[:, :-1], backend="pallas")


@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}], ids=["all", "causal"])
def test_heads_that_share_keys(kwargs, ran):
    inputs = qkv(heads=4, kv_heads=2)
    wanted = dispatch_attention_fn(*inputs, enable_gqa=True, **kwargs, backend="native")
    came = dispatch_attention_fn(*inputs, enable_gqa=True, **kwargs, backend="pallas")
    torch.testing.assert_close(came, wanted, rtol=1e-5, atol=1e-5)
    assert len(ran) == 1


def test_the_same_through_the_interpreter(monkeypatch, ran):
    monkeypatch.setenv("PALLAS_HUB_INTERPRET", "1")
    inputs = qkv(dtype=torch.bfloat16)
    with torch.no_grad():
        came = dispatch_attention_fn(*inputs, attn_mask=CASES["keys"]["attn_mask"], backend="pallas")
        wanted = dispatch_attention_fn(*inputs, attn_mask=CASES["keys"]["attn_mask"], backend="native")
    assert ran == [("flash_attention::attention", "interpret")]
    # Both round weights of the scores and the result to bfloat16: two units in the last place, of values around 1.
    torch.testing.assert_close(came, wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_log_sum_exp_on_request(is_causal, ran):
    q, k, v = qkv(lq=LK)
    out, lse = dispatch_attention_fn(
        q, k, v, is_causal=is_causal, attention_kwargs={"return_lse": True}, backend="pallas"
    )
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * 8**-0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(LK, LK, dtype=torch.bool).tril(), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1).transpose(1, 2))  # (batch, length, heads)
    torch.testing.assert_close(out, dispatch_attention_fn(q, k, v, is_causal=is_causal), rtol=1e-5, atol=1e-5)


def test_rejects_dropout():
    with pytest.raises(
        ValueError,
        match=r'attention backend "pallas": dropout_p must be 0, the kernel drops nothing; got 0.1. Set the dropout of '
        r'the attention layers to 0, or use set_attention_backend\("native"\) to train with it.',
    ):
        dispatch_attention_fn(*qkv(), dropout_p=0.1, backend="pallas")


def test_rejects_block_masks():
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    with pytest.raises(
        TypeError,
        match=r'attention backend "pallas": attn_mask must be a tensor; got a BlockMask, which only the backend "flex" '
        r'takes. Try set_attention_backend\("flex"\) for this model.',
    ):
        dispatch_attention_fn(*qkv(), attn_mask=mask, backend="pallas")


def test_rejects_the_log_sum_exp_with_a_mask():
    with pytest.raises(
        ValueError,
        match=r'attention backend "pallas": the log-sum-exp \(return_lse=True, ring attention\) comes without attn_mask'
        r"; got a mask \(2, 1, 4, 5\). Leave one of them out; Ulysses attention takes masks.",
    ):
        dispatch_attention_fn(*qkv(), attn_mask=BOOLS, attention_kwargs={"return_lse": True}, backend="pallas")


def test_rejects_the_log_sum_exp_of_causal_rows_that_are_not_as_many_as_keys():
    with pytest.raises(
        ValueError,
        match=r'attention backend "pallas": return_lse=True with is_causal=True needs as many queries as keys; got 4 '
        r"and 5. Leave return_lse out.",
    ):
        dispatch_attention_fn(*qkv(), is_causal=True, attention_kwargs={"return_lse": True}, backend="pallas")


def test_it_has_every_parameter_of_native():
    ours, native = (inspect.signature(_AttentionBackendRegistry._backends[name]) for name in ("pallas", "native"))
    assert list(ours.parameters) == list(native.parameters)
    assert [p.default for p in ours.parameters.values()] == [p.default for p in native.parameters.values()]


def test_no_model_of_diffusers_passes_anything_else():
    """All calls in the installed Diffusers: no argument that the backend would not get."""
    known = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    asked = set()
    files = 0
    for path in Path(diffusers.__file__).parent.rglob("*.py"):
        text = path.read_text()
        calls = []
        if "dispatch_attention_fn(" in text and path.name != "attention_dispatch.py":
            calls = [node for node in ast.walk(ast.parse(text)) if _calls_dispatch(node)]
        asked |= {keyword.arg for call in calls for keyword in call.keywords}
        files += bool(calls)
    assert files > 50
    # attention_kwargs: a window, which ACE-Step gives to backends named after flash-attn only
    assert asked - known == {"attention_kwargs", "backend", "parallel_config"}


def _calls_dispatch(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dispatch_attention_fn"
