"""Every refusal, in its words."""

import math

import pytest
import torch
from flash_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from flash_attention_truth import qkv, random

Q, K, V = qkv(2, 3, 5, 4, 2, 8)
ENDS = torch.tensor([0, 3, 6])


def _refused(error, words, function, *args, **options):
    with pytest.raises(error, match=words):
        function(*args, **options)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((Q[0, 0], K, V), r"flash_attn_func: q must be \(b, lq, hq, d\); got \(4, 8\)\."),
        ((Q, K[0], V), r"flash_attn_func: k must be \(b, lk, hk, d\); got \(5, 2, 8\)\."),
        ((Q, K, V[0]), r"flash_attn_func: v must be \(b, lk, hk, dv\); got \(5, 2, 8\)\."),
        ((Q, K[..., :4], V), r"k must have d = 8 like q \(2, 3, 4, 8\); got \(2, 5, 2, 4\)\."),
        ((Q, K, V[:, :, :1]), r"v must have hk = 2 like k \(2, 5, 2, 8\); got \(2, 5, 1, 8\)\."),
        ((Q, K, V[:, :3]), r"v must have lk = 5 like k \(2, 5, 2, 8\); got \(2, 3, 2, 8\)\."),
        ((Q, K[:1], V[:1]), r"k must have b = 2 like q \(2, 3, 4, 8\); got \(1, 5, 2, 8\)\."),
        ((Q[:, :, :3], K, V), r"hq must be a multiple of hk, so .* k serves as many heads of q; got hq = 3, hk = 2\."),
        ((Q, K.to("meta"), V), r"all tensors must be on one device; got q on cpu, k on meta, v on cpu\. Try \.to\(q"),
    ],
    ids=str,
)
def test_shapes(tensors, words):
    _refused(ValueError, words, flash_attn_func, *tensors)


def test_types():
    _refused(
        TypeError, r"q is int64; supported: float32, .* Try q\.to\(torch\.float32\)", flash_attn_func, Q.long(), K, V
    )
    _refused(
        TypeError,
        r"v must have the dtype of q, float32; got bfloat16\. Try v\.to\(q\.",
        flash_attn_func,
        Q,
        K,
        V.bfloat16(),
    )
    _refused(
        TypeError, r"flash_attn_func: k must be a tensor; got list\. Try torch\.tensor\(k\)", flash_attn_func, Q, [1], V
    )


@pytest.mark.parametrize("function", [flash_attn_func, scaled_dot_product_attention])
def test_dropout_is_refused_in_words(function):
    words = (
        rf"{function.__name__}: dropout_p must be 0, since no path drops attention weights; got 0\.1\. Set the model's"
    )
    _refused(ValueError, words, function, Q, K, V, dropout_p=0.1)


@pytest.mark.parametrize("softcap", [-1, -1.0, math.inf, math.nan, "5"], ids=str)
def test_softcap(softcap):
    words = rf"softcap must be above 0 and finite, or 0 or None for none; got {softcap}\."
    _refused(ValueError, words, flash_attn_func, Q, K, V, softcap=softcap)


@pytest.mark.parametrize("window_size", [3, (3,), (1, 2, 3), (-2, 0), (1.5, 0), (True, 0)], ids=str)
def test_window(window_size):
    _refused(
        ValueError, r"window_size must be \(left, right\), .*got ", flash_attn_func, Q, K, V, window_size=window_size
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"alibi_slopes": torch.ones(3)},
            r"alibi_slopes must be \(hq,\) or \(b, hq\) = \(4,\) or \(2, 4\); got \(3,\)\.",
        ),
        (
            {"alibi_slopes": torch.ones(4, requires_grad=True)},
            r"alibi_slopes must not require a gradient, which no path has; got one that does\. Try alibi_slopes\.",
        ),
        ({"s_aux": torch.ones(2)}, r"s_aux must be \(hq,\) = \(4,\), a sink per head; got \(2,\)\."),
        ({"s_aux": [1.0]}, r"s_aux must be a tensor; got list"),
    ],
    ids=str,
)
def test_slopes_and_sinks(options, words):
    _refused((ValueError, TypeError), words, flash_attn_func, Q, K, V, **options)


def test_segment_ids():
    ids = torch.zeros(2, 5, dtype=torch.int32)
    _refused(ValueError, r"segment_ids needs lq = lk.*got lq = 3, lk = 5\.", flash_attn_func, Q, K, V, segment_ids=ids)
    square = qkv(2, 5, 5, 4, 2, 8)
    for wrong, came in ((ids[:, :4], r"int32 \(2, 4\)"), (ids.float(), r"float32 \(2, 5\)"), ([0] * 5, "list")):
        words = rf"segment_ids must be whole numbers \(b, l\) = \(2, 5\); got {came}\."
        _refused(ValueError, words, flash_attn_func, *square, segment_ids=wrong)
    ids[1] = torch.tensor([3, 3, 4, 3, 3])
    words = r"segment_ids must keep each segment in one run; got 3 in two places\. Sort"
    _refused(ValueError, words, flash_attn_func, *square, segment_ids=ids)


@pytest.mark.parametrize(
    ("mask", "came"), [(torch.ones(2, 3).bool(), r"bool \(2, 3\)"), (torch.ones(2, 5), r"float32 \(2, 5\)"), (1, "int")]
)
def test_key_padding_mask(mask, came):
    words = rf"key_padding_mask must be bool or whole numbers \(b, lk\) = \(2, 5\), true for real keys; got {came}\."
    _refused(ValueError, words, flash_attn_func, Q, K, V, key_padding_mask=mask)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (torch.tensor([0, 3, 2]), r"must not decrease; got cu_seqlens_q\[2\] = 2 after 3\. If these are lengths"),
        (torch.tensor([1, 3]), r"must go from 0 to at most total_q = 6; got cu_seqlens_q\[0\] = 1\."),
        (torch.tensor([0, 9]), r"must go from 0 to at most total_q = 6; got cu_seqlens_q\[-1\] = 9\."),
        (torch.tensor([[0, 6]]), r"cu_seqlens_q must be \(n \+ 1,\); got \(1, 2\)\."),
        (torch.tensor([], dtype=torch.int32), r"cu_seqlens_q must be \(n \+ 1,\), starting with 0; got \(0,\)\."),
        (torch.tensor([0.0, 6.0]), r"cu_seqlens_q is float32; supported: int32, int64\. Try cu_seqlens_q\.to"),
        ([0, 6], r"cu_seqlens_q must be a tensor; got list\."),
    ],
    ids=str,
)
def test_cu_seqlens(ends, words):
    q, k, v = (x.flatten(0, 1) for x in qkv(2, 3, 3, 4, 2, 8))
    _refused((ValueError, TypeError), words, flash_attn_varlen_func, q, k, v, ends, ENDS)


def test_packed_shapes():
    q, k, v = (x.flatten(0, 1) for x in qkv(2, 3, 3, 4, 2, 8))
    words = r"cu_seqlens_k must be \(n \+ 1,\) = \(3,\); got \(2,\)\."
    _refused(ValueError, words, flash_attn_varlen_func, q, k, v, ENDS, ENDS[:2])
    words = r"flash_attn_varlen_func: q must be \(total_q, hq, d\); got \(2, 3, 4, 8\)\. Try q\.flatten\(0, 1\)\."
    _refused(ValueError, words, flash_attn_varlen_func, Q, K, V, ENDS, ENDS)
    words = r"alibi_slopes must be \(hq,\) = \(4,\); got \(2, 4\)\."
    _refused(ValueError, words, flash_attn_varlen_func, q, k, v, ENDS, ENDS, alibi_slopes=torch.ones(2, 4))


def _with_cache(**options):
    return flash_attn_with_kvcache(Q, K.clone(), V.clone(), **options)


NEW = {"k": random(2, 2, 2, 8), "v": random(2, 2, 2, 8)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rotary_cos": Q}, r"rotary_cos and rotary_sin must be None; got tensors\. Rotate q and k before the call\."),
        (
            {"cache_seqlens": torch.tensor([1, 6])},
            r"must have 0 \.\.\. 5 keys, the room in the cache; got 6 in sequence 1\.",
        ),
        (
            {"cache_seqlens": torch.tensor([1, 4]), **NEW},
            r"must have 0 \.\.\. 5 keys, the room in the cache; got 4 and 2 to append in sequence 1\.",
        ),
        ({"cache_seqlens": 6}, r"must have 0 \.\.\. 5 keys, the room in the cache; got 6 in sequence 0\."),
        ({"cache_seqlens": torch.tensor([1])}, r"cache_seqlens must be \(b,\) = \(2,\); got \(1,\)\."),
        (NEW, r"cache_seqlens must say where k and v go; got None\."),
        ({"k": NEW["k"], "cache_seqlens": 1}, r"k and v must be given together; got k alone\."),
        (
            {"k": NEW["k"], "v": NEW["v"][..., :4], "cache_seqlens": 1},
            r"v must be \(b, l, hk, d\) = \(2, 2, 2, 8\) for v_cache; got \(2, 2, 2, 4\)\.",
        ),
        ({"cache_leftpad": torch.tensor([1])}, r"cache_leftpad must be \(b,\) = \(2,\); got \(1,\)\."),
        (
            {"block_table": torch.zeros(3, 1, dtype=torch.int32)},
            r"block_table must be .* = \(2, most pages\); got \(3, 1\)\.",
        ),
        (
            {"block_table": torch.zeros(2, 1, dtype=torch.int32), "cache_leftpad": torch.tensor([1, 0])},
            r"cache_leftpad must be None with block_table; got a tensor\.",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_caches(options, words):
    _refused(ValueError, words, _with_cache, **options)


HEADS_FIRST = [x.transpose(1, 2) for x in (Q, K, V)]
FULL = [x.transpose(1, 2) for x in qkv(2, 3, 5, 4, 4, 8)]


@pytest.mark.parametrize("way", ["plain", "torch"])
@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        (HEADS_FIRST, {}, r"key must have as many heads as query, 4; got 2\. Try enable_gqa=True\."),
        (
            [FULL[0], FULL[1][..., :4], FULL[2]],
            {},
            r"key must have d = 8 like query \(2, 4, 3, 8\); got \(2, 4, 5, 4\)\.",
        ),
        (
            [FULL[0], FULL[1], FULL[2][:, :, :3]],
            {},
            r"value must be shaped like key \(2, 4, 5, 8\) up to d; got \(2, 4, 3",
        ),
        ([x[0, 0] for x in FULL], {}, r"query must be \(\.\.\., heads, length, d\)"),
        (FULL, {"attn_mask": torch.ones(3, 5), "is_causal": True}, r"give attn_mask or is_causal, not both\."),
        (
            FULL,
            {"attn_mask": torch.ones(3, 4)},
            r"attn_mask must be broadcastable to .* = \(2, 4, 3, 5\); got \(3, 4\)\.",
        ),
        (
            FULL,
            {"attn_mask": torch.ones(3, 5).int()},
            r"attn_mask must be bool, or float32 or of query's dtype.*got int32",
        ),
        ([FULL[0], FULL[1], FULL[2].bfloat16()], {}, r"value must have the dtype of query, float32; got bfloat16\."),
        ([FULL[0], FULL[1], 3], {}, r"value must be a tensor; got int\."),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_scaled_dot_product_attention(args, options, words, way):
    from flash_attention_truth import under

    if way == "plain" and len(args[0].shape) == 2:
        pytest.skip("torch takes it")
    with under(way):
        _refused((ValueError, TypeError), words, scaled_dot_product_attention, *args, **options)
