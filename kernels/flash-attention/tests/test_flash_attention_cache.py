"""Packed sequences, caches of keys in one piece and in pages: each sequence as if it were alone."""

import pytest
import torch
from flash_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attention_truth import assert_close, qkv, random, under

OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (2, 0)},
    {"window_size": (1, 3), "softcap": 2.0},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.2]), "s_aux": torch.tensor([0.1, -1.0, 2.0, 0.0])},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.2])},
]
_id = lambda options: "-".join(options) or "plain"  # noqa: E731

# Rows and keys of each sequence: none of either, more rows than keys, and the other way round.
SEQUENCES = [(3, 3), (0, 4), (2, 0), (5, 2), (1, 70), (0, 0), (66, 68), (1, 1)]


def _packed(sequences, grad=False):
    lq, lk = (sum(lengths) for lengths in zip(*sequences, strict=True))
    q, k, v = (x[0].detach().requires_grad_(grad) for x in qkv(1, lq + 2, lk + 3, 4, 2, 8))  # and some of no sequence
    ends = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in zip(*sequences, strict=True))
    return q, k, v, *ends


def _one_by_one(q, k, v, ends_q, ends_k, **options):
    outs, lses = [], []
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        out, lse, _ = flash_attn_func(q[None, rows], k[None, keys], v[None, keys], **options, return_attn_probs=True)
        outs.append(out[0]), lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=_id)
def test_packed_sequences_are_as_each_alone(options):
    q, k, v, ends_q, ends_k = _packed(SEQUENCES, grad=True)
    out, lse, _ = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 66, 70, **options, return_attn_probs=True)
    wanted, wanted_lse = _one_by_one(q, k, v, ends_q, ends_k, **options)
    rows = int(ends_q[-1])
    assert_close(out[:rows], wanted, terms=70)
    assert_close(lse[:, :rows].exp(), wanted_lse.exp(), terms=70)
    assert not out[rows:].any()
    upstream = random(*out.shape, seed=9)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for one, other in zip(got, torch.autograd.grad(wanted, (q, k, v), upstream[:rows]), strict=True):
        assert_close(one, other, terms=140)


def test_packed_sequences_in_the_interpreted_kernel():
    q, k, v, ends_q, ends_k = _packed(SEQUENCES)
    options = {"causal": True, "window_size": (40, 0), "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.2])}
    wanted = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 66, 70, **options)
    with under("interpret"):
        assert_close(flash_attn_varlen_func(q, k, v, ends_q, ends_k, 66, 70, **options), wanted, terms=70)


@pytest.mark.parametrize("sequences", [[], [(0, 0)], [(0, 5)], [(4, 0)]], ids=str)
def test_next_to_nothing(sequences):
    lq, lk = sum(s[0] for s in sequences), sum(s[1] for s in sequences)
    q, k, v = (x[0] for x in qkv(1, lq, lk, 4, 2, 8))
    ends = [torch.tensor([0, *[s[i] for s in sequences]]).cumsum(0) for i in range(2)]
    out = flash_attn_varlen_func(q, k, v, *ends, causal=True)
    assert torch.equal(out, torch.zeros(lq, 4, 8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_greatest_lengths_may_be_anything(dtype):
    q, k, v, ends_q, ends_k = _packed([(3, 3), (2, 4)])
    wanted = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 3, 4)
    for greatest in ((None, None), (torch.tensor(3), torch.tensor(4)), (100, 100)):
        assert torch.equal(flash_attn_varlen_func(q, k, v, ends_q.to(dtype), ends_k.to(dtype), *greatest), wanted)


LENGTHS = [0, 3, 7, 12]  # of the cached sequences; the cache has room for 12


def _caches(sequences=4, room=12, d=8):
    return random(sequences, room, 2, d, seed=4), random(sequences, room, 2, d, seed=5)


@pytest.mark.parametrize("options", OPTIONS, ids=_id)
@pytest.mark.parametrize("lq", [1, 3])
def test_a_cache_is_as_its_keys_alone(lq, options):
    q, caches = random(4, lq, 4, 8), _caches()
    out, lse = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=torch.tensor(LENGTHS), **options, return_softmax_lse=True
    )
    for i, length in enumerate(LENGTHS):
        keys, values = (cache[i : i + 1, :length] for cache in caches)
        wanted, wanted_lse, _ = flash_attn_func(q[i : i + 1], keys, values, **options, return_attn_probs=True)
        assert_close(out[i : i + 1], wanted, terms=12)
        assert_close(lse[i : i + 1].exp(), wanted_lse.exp(), terms=12)


def test_a_cache_in_the_interpreted_kernel():
    q, caches = random(4, 3, 4, 8), _caches()
    options = {"cache_seqlens": torch.tensor(LENGTHS), "causal": True, "window_size": (4, 0)}
    wanted = flash_attn_with_kvcache(q, *caches, **options)
    with under("interpret"):
        assert_close(flash_attn_with_kvcache(q, *caches, **options), wanted, terms=12)


def test_what_lies_past_the_length_is_not_read():
    q, caches = random(4, 2, 4, 8), _caches()
    wanted = flash_attn_with_kvcache(q, *caches, cache_seqlens=torch.tensor(LENGTHS), causal=True)
    for cache in caches:
        for i, length in enumerate(LENGTHS):
            cache[i, length:] = float("nan")
    assert torch.equal(flash_attn_with_kvcache(q, *caches, cache_seqlens=torch.tensor(LENGTHS), causal=True), wanted)


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("chosen", [None, [3, 0]], ids=str)
def test_new_keys_are_written_into_the_cache(chosen, new):
    caches = _caches()
    before = [cache.clone() for cache in caches]
    entries = list(range(4)) if chosen is None else chosen
    lengths = [LENGTHS[i] if LENGTHS[i] < 9 else 5 for i in entries]
    b = len(entries)
    q, k, v = random(b, new, 4, 8), random(b, new, 2, 8, seed=6), random(b, new, 2, 8, seed=7)
    index = None if chosen is None else torch.tensor(chosen)
    out = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=torch.tensor(lengths), cache_batch_idx=index, causal=True
    )
    for cache, old, added in zip(caches, before, (k, v), strict=True):
        for i, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
            old[entry, length : length + new] = added[i]
        assert torch.equal(cache, old)
    for i, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        keys, values = (cache[entry : entry + 1, : length + new] for cache in caches)
        assert_close(out[i : i + 1], flash_attn_func(q[i : i + 1], keys, values, causal=True), terms=12)


def test_one_length_for_all_and_none_for_a_full_cache():
    q, caches = random(4, 1, 4, 8), _caches()
    assert_close(flash_attn_with_kvcache(q, *caches), flash_attn_func(q, *caches), terms=12)
    shorter = [cache[:, :5] for cache in caches]
    assert_close(flash_attn_with_kvcache(q, *caches, cache_seqlens=5), flash_attn_func(q, *shorter), terms=5)


def _in_pages(caches, page=4, spare=3):
    """The same caches in pages of 4, in some order, with -1 in the table where a sequence needs no page."""
    b, room = caches[0].shape[:2]
    order = torch.randperm(b * room // page + spare, generator=torch.Generator().manual_seed(0))
    table = order[: b * room // page].view(b, -1).int()
    pools = [torch.full((len(order), page, *cache.shape[2:]), float("nan")) for cache in caches]
    for pool, cache in zip(pools, caches, strict=True):
        pool[table.long()] = cache.unflatten(1, (-1, page))
    return pools, table


@pytest.mark.parametrize("options", OPTIONS[1:3], ids=_id)
@pytest.mark.parametrize("new", [0, 3])
def test_pages(new, options):
    caches, lengths = _caches(), torch.tensor([0, 3, 7, 9])
    pools, table = _in_pages(caches)
    table[0, 1:] = -1  # 0 keys, and 3 new ones at most
    q = random(4, 3, 4, 8)
    added = [random(4, new, 2, 8, seed=6), random(4, new, 2, 8, seed=7)] if new else []
    out = flash_attn_with_kvcache(q, *pools, *added, cache_seqlens=lengths, block_table=table, **options)
    wanted = flash_attn_with_kvcache(q, *caches, *added, cache_seqlens=lengths, **options)
    assert_close(out, wanted, terms=12)
    for pool, cache in zip(pools, caches, strict=True):
        gathered = pool[table.long().clamp(min=0)].flatten(1, 2)
        for i, length in enumerate(lengths.tolist()):
            assert torch.equal(gathered[i, : length + new], cache[i, : length + new])


def test_packed_rows_over_pages():
    caches = _caches()
    pools, table = _in_pages(caches)
    rows, lengths = [2, 0, 1, 4], [5, 3, 7, 12]
    q = random(7, 4, 8)
    ends = [torch.tensor([0, *x]).cumsum(0).int() for x in (rows, lengths)]
    got = flash_attn_varlen_func(q, *pools, *ends, 4, 12, causal=True, block_table=table)
    keys, values = (torch.cat([cache[i, :n] for i, n in enumerate(lengths)]) for cache in caches)
    assert_close(got, flash_attn_varlen_func(q, keys, values, *ends, causal=True), terms=12)


def _paged(table, **options):
    q, k, v = qkv(2, 1, 1, 2, 1, 8)
    pages = torch.zeros(6, 4, 1, 8), torch.zeros(6, 4, 1, 8)
    options = {"cache_seqlens": torch.tensor([5, 6]), "block_table": table} | options
    return pages, lambda append: flash_attn_with_kvcache(q, *pages, *((k, v) if append else ()), **options)


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("page", [-1, 99])
def test_a_page_that_is_not_there_is_neither_read_nor_written(page, append):
    pages, call = _paged(torch.tensor([[0, page], [2, 3]]))
    with pytest.raises(ValueError, match=rf"block_table must name pages .* = 5 .*; got {page} in block_t"):
        call(append)
    assert not any(x.any() for x in pages)


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ([[0, 1], [2, 3]], TypeError, r"block_table must be a tensor; got list"),
        (torch.zeros(2), ValueError, r"block_table must be \(sequences, most pages\) = \(2, most pages\); got \(2,\)"),
        (torch.zeros(2, 2, dtype=torch.bool), TypeError, r"block_table is bool; supported: int32, int64"),
    ],
    ids=["list", "flat", "bool"],
)
@pytest.mark.parametrize("append", [False, True])
def test_what_is_no_table_is_refused(table, error, words, append):
    with pytest.raises(error, match=words):
        _paged(table)[1](append)


@pytest.mark.parametrize("pad", [-1, 4])
def test_padding_outside_of_the_sequence_is_refused(pad):
    q, k, v = qkv(1, 1, 4, 2, 2, 8)
    words = rf"cache_leftpad must be 0 \.\.\. cache_seqlens = 3 in sequence 0; got {pad}"
    with pytest.raises(ValueError, match=words):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=3, cache_leftpad=torch.tensor([pad], dtype=torch.int32))


@pytest.mark.parametrize("entry", [-1, 2])
def test_an_entry_that_is_not_there_is_refused(entry):
    q, k, v = qkv(1, 1, 4, 2, 2, 8)
    caches = torch.cat([k, k]), torch.cat([v, v])
    with pytest.raises(ValueError, match=rf"cache_batch_idx must name entries 0 \.\.\. 1 of the cache; got {entry} in"):
        flash_attn_with_kvcache(q, *caches, cache_seqlens=3, cache_batch_idx=torch.tensor([entry]))


def test_under_autocast_what_is_appended_gets_the_dtype_of_the_cache():
    q, k, v = qkv(1, 1, 1, 2, 2, 8)
    caches = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16), torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=2)
    assert torch.equal(caches[0][:, 2], k[:, 0].bfloat16())
