"""Mistakes that libraries like this one have been reported for, each with its right values, on every path."""

import math

import pytest
import torch
import torch.nn.functional as F
from flash_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from flash_attention_truth import WAYS, assert_close, attention, qkv, random, under, window, with_ways


@pytest.fixture(params=WAYS)
def way(request):
    with under(request.param):
        yield request.param


def each_way(names: str, cases: list, interpreted: int = 1):
    """The test's `way` and arguments: every case on the torch paths, the first ones interpreted too."""
    split = names.split(", ")
    pairs = with_ways(cases, interpreted)
    rows = [(way, *(case if len(split) > 1 else (case,))) for way, case in pairs]
    return pytest.mark.parametrize(("way", *split), rows, ids=str, indirect=["way"])


def _counting(lq, lk, h=1, d=8):
    """q = 0 and v[j] = j: each result is the mean of the positions that the row sees."""
    v = torch.arange(float(lk)).view(1, lk, 1, 1).expand(1, lk, h, d)
    return torch.zeros(1, lq, h, d), torch.zeros(1, lk, h, d), v


def _first(out):
    return out[0, :, 0, 0].tolist()


# 1. Where the causal diagonal sits.


@each_way("lq, lk, wanted", [(2, 5, [1.5, 2.0]), (5, 2, [0, 0, 0, 0.0, 0.5]), (1, 5, [2.0])], interpreted=3)
def test_causal_is_aligned_bottom_right(way, lq, lk, wanted):
    assert _first(flash_attn_func(*_counting(lq, lk), causal=True)) == pytest.approx(wanted)


@each_way("lq, lk", [(2, 5), (5, 2), (1, 5)], interpreted=2)
def test_scaled_dot_product_attention_keeps_torch_alignment_top_left(way, lq, lk):
    heads_first = [x.transpose(1, 2) for x in _counting(lq, lk)]
    got = scaled_dot_product_attention(*heads_first, is_causal=True)
    assert_close(got, F.scaled_dot_product_attention(*heads_first, is_causal=True))
    assert got[0, 0, 0, 0] == 0.0  # the first row sees the first key


# 2. A window that is one too wide.


COUNTED = [(6, 3, [0, 0.5, 1, 2, 3, 4]), (1, 3, [4.0]), (6, 1, [0, 1, 2, 3, 4, 5]), (6, 9, [0, 0.5, 1, 1.5, 2, 2.5])]


@each_way("lq, width, wanted", COUNTED)
def test_a_causal_window_counts_the_row_s_own_key(way, lq, width, wanted):
    for right in (0, -1, 5):  # a causal window ends on the diagonal, whatever is said
        out = flash_attn_func(*_counting(lq, 6), causal=True, window_size=(width - 1, right))
        assert _first(out) == pytest.approx(wanted)


def test_a_window_to_both_sides(way):
    assert _first(flash_attn_func(*_counting(5, 5), window_size=(1, 2))) == pytest.approx([1, 1.5, 2.5, 3, 3.5])
    assert _first(flash_attn_func(*_counting(5, 5), window_size=(-1, 0))) == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert _first(flash_attn_func(*_counting(5, 5), window_size=(0, -1))) == pytest.approx([2, 2.5, 3, 3.5, 4])


# 3. Rows that see nothing; padding at the left.


def test_a_row_whose_mask_is_false_everywhere_is_zero_and_gets_no_gradient(way):
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv(1, 4, 6, 2, 2, 8))
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2] = False
    out = scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(out[:, :, 2], torch.zeros(1, 2, 8))
    out.square().sum().backward()
    assert torch.equal(q.grad[:, :, 2], torch.zeros(1, 2, 8))
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    rest = [i for i in range(4) if i != 2]
    assert_close(out[:, :, rest], F.scaled_dot_product_attention(q[:, :, rest], k, v))


def test_a_row_of_the_smallest_number_is_finite(way):
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 4, 6, 2, 2, 8))
    mask = torch.zeros(4, 6)
    mask[2] = torch.finfo(torch.float32).min
    out = scaled_dot_product_attention(q, k, v, mask)
    assert torch.isfinite(out).all()
    assert_close(out[:, :, 2], v.mean(2), terms=6)


def test_rows_before_the_first_key_are_zero_and_send_no_nan_back(way):
    q, k, v = qkv(1, 5, 2, 2, 1, 8, grad=True)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out[:, :3], torch.zeros(1, 3, 2, 8))
    assert torch.equal(lse[:, :, :3], torch.full((1, 2, 3), -math.inf))
    out.square().sum().backward()
    assert torch.equal(q.grad[:, :3], torch.zeros(1, 3, 2, 8))
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@each_way("padded", ["cache_leftpad", "cu_seqlens", "key_padding_mask"], interpreted=3)
def test_padding_at_the_left_changes_nothing_for_the_rest(way, padded):
    """Prompts of lengths 3 and 5 in one batch of 5: what each gives alone."""
    q, k, v = qkv(2, 5, 5, 4, 2, 8)
    alone = [
        flash_attn_func(q[:1, 2:], k[:1, 2:], v[:1, 2:], causal=True),
        flash_attn_func(q[1:], k[1:], v[1:], causal=True),
    ]
    if padded == "cache_leftpad":
        pad = torch.tensor([2, 0])
        out = flash_attn_with_kvcache(q, k, v, cache_leftpad=pad, causal=True)
        assert torch.equal(out[0, :2], torch.zeros(2, 4, 8))
        got = [out[:1, 2:], out[1:]]
    elif padded == "key_padding_mask":
        real = torch.tensor([[False] * 2 + [True] * 3, [True] * 5])
        out = flash_attn_func(q, k, v, causal=True, key_padding_mask=real)
        got = [out[:1, 2:], out[1:]]
    else:
        real = torch.tensor([[False] * 2 + [True] * 3, [True] * 5])
        ends = torch.tensor([0, 3, 8], dtype=torch.int32)
        out = flash_attn_varlen_func(q[real], k[real], v[real], ends, ends, 5, 5, causal=True)
        got = [out[None, :3], out[None, 3:]]
    for one, other in zip(got, alone, strict=True):
        assert_close(one, other)


# 4. Lengths that no block divides.


@each_way("lq, lk", [(130, 257), (192, 192), (5, 129)])
def test_lengths_that_blocks_do_not_divide(way, lq, lk):
    q, k, v = qkv(1, lq, lk, 2, 1, 16)
    results = {}
    for causal in (True, False):
        results[causal] = flash_attn_func(q, k, v, causal=causal)
        seen = window(lq, lk, right=0 if causal else -1)
        assert_close(results[causal], attention(q, k, v, seen)[0], terms=lk)
        assert torch.equal(flash_attn_func(q, k, v, causal=causal), results[causal])
    assert not torch.allclose(results[True], results[False])


@pytest.mark.parametrize("length", [1000, 4092])
def test_long_lengths_that_blocks_do_not_divide(length):
    q, k, v = qkv(1, length, length, 1, 1, 8)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    wanted = attention(q, k, v, seen)[0]
    for other in ("plain", "torch"):
        with under(other):
            out = flash_attn_func(q, k, v, causal=True)
            assert_close(out, wanted, terms=length)
            for _ in range(2):
                assert torch.equal(flash_attn_func(q, k, v, causal=True), out)


# 5. Grouped heads and odd sizes of heads.


def test_heads_of_keys_are_repeated_and_not_tiled(way):
    q, k = random(1, 4, 6, 8), random(1, 5, 2, 8)
    v = torch.arange(2.0).view(1, 1, 2, 1).expand(1, 5, 2, 8)
    assert flash_attn_func(q, k, v)[0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, 1, 1, 1])


@each_way("hq, hk", [(6, 2), (28, 4), (3, 1)])
def test_gradients_of_keys_are_summed_over_their_heads(way, hq, hk):
    q, k, v = qkv(1, 4, 5, hq, hk, 8, grad=True)
    upstream = random(1, 4, hq, 8, seed=9)
    got = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k, v), upstream)
    wanted = torch.autograd.grad(attention(q, k, v, window(4, 5, right=0))[0], (q, k, v), upstream.double())
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
        assert_close(one, other, terms=20)


SIZES = [(192, 128), (80, 80), (8, 8), (64, 64), (96, 96), (192, 192), (256, 256), (8, 24)]


@each_way("d, dv", SIZES, interpreted=2)
def test_any_size_of_head_with_the_scale_of_the_true_one(way, d, dv):
    q, k, v = qkv(1, 5, 9, 2, 1, d, dv, grad=True)
    out = flash_attn_func(q, k, v, causal=True)
    wanted = attention(q, k, v, window(5, 9, right=0))[0]
    assert out.shape == (1, 5, 2, dv)
    assert_close(out, wanted, terms=d)
    upstream = random(*out.shape, seed=9)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for one, other in zip(got, torch.autograd.grad(wanted, (q, k, v), upstream.double()), strict=True):
        assert_close(one, other, terms=d)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"hq must be a multiple of hk.*got hq = 6, hk = 4\."):
        flash_attn_func(*qkv(1, 2, 2, 6, 4, 8))


# 6. An argument that is accepted and ignored.


def _logits_100_and_0():
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 2, 1, 8)
    q[..., 0], k[0, 0, 0, 0] = 1.0, 100.0
    v = torch.zeros(1, 2, 1, 8)
    v[0, 0] = 1.0
    return q, k, v


@each_way("softcap, wanted", [(5.0, 0.99331), (0.0, 1.0), (None, 1.0), (5, 0.99331)])
def test_softcap(way, softcap, wanted):
    out = flash_attn_func(*_logits_100_and_0(), softmax_scale=1.0, softcap=softcap)
    assert out[0, 0, 0, 0].item() == pytest.approx(wanted, abs=2e-5)


def test_sinks_are_one_more_logit(way):
    q, k, v = (torch.zeros(1, 1, 2, 8), torch.zeros(1, 3, 2, 8), torch.ones(1, 3, 2, 8))
    out = flash_attn_func(q, k, v, s_aux=torch.tensor([0.0, math.log(3.0)]))
    assert out[0, 0, :, 0].tolist() == pytest.approx([0.75, 0.5])


def test_alibi_takes_the_distance_off_the_scores(way):
    q, k, v = _counting(1, 2)
    out = flash_attn_func(q, k, v, alibi_slopes=torch.tensor([math.log(3.0)]), causal=True)
    assert _first(out) == pytest.approx([0.75])  # weights 1/4 and 3/4 of the keys at distances 1 and 0


def test_softmax_scale(way):
    q, k, v = _logits_100_and_0()
    out = flash_attn_func(q, k, v, softmax_scale=0.01)
    assert out[0, 0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-6)
