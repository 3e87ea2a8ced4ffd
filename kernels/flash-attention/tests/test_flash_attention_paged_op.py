"""Attention over pages as users call it, and the cache in pages that generate() fills."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from flash_attention import flash_attn_with_kvcache  # noqa: E402
from flash_attention._bridge import record_paths, use_path  # noqa: E402
from flash_attention.paged_cache import InPages, PagedKVCache, attend_in_pages  # noqa: E402
from flash_attention.paged_op import paged_attention, paged_attention_op  # noqa: E402
from paged_checks import in_pages  # noqa: E402


def arguments(lengths=(20, 9, 31, 0), q_sizes=(1, 4, 2, 0), dtype=torch.float32, **sizes):
    pages = in_pages(lengths, q_sizes, **({"hq": 4, "hk": 2, "d": 16} | sizes))
    floats = [torch.from_numpy(x).to(dtype) for x in (pages.q, pages.k, pages.v)]
    return [*floats, *(torch.from_numpy(x) for x in (pages.lengths, pages.table, pages.q_starts))]


def by_hand(q, k_pages, v_pages, lengths, table, starts, *, causal=True, window_left=-1, softcap=0.0, sinks=None):
    """Each query and head by itself, in float64."""
    out = torch.zeros(*q.shape[:2], v_pages.shape[3], dtype=torch.float64)
    group = q.shape[1] // k_pages.shape[2]
    for n, length in enumerate(lengths.tolist()):
        pages = table[n, : -(-length // k_pages.shape[1])]
        keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k_pages, v_pages))
        for row in range(starts[n], starts[n + 1]):
            position = length - int(starts[n + 1]) + row
            low = 0 if window_left < 0 else max(position - window_left, 0)
            high = position + 1 if causal else length
            if high <= low:
                continue
            for head in range(q.shape[1]):
                scores = keys[low:high, head // group] @ q[row, head].double() * q.shape[2] ** -0.5
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                sink = [] if sinks is None else [sinks[head].double()]
                weights = torch.softmax(torch.stack([*scores, *sink]), 0)[: high - low]
                out[row, head] = weights @ values[low:high, head // group]
    return out


RULES = [
    {},
    {"causal": False},
    {"window_left": 3},
    {"window_left": 0, "causal": False, "sinks": torch.tensor([1.0, -1.0, 0.0, 9.0])},
    {"softcap": 2.0, "sinks": torch.tensor([1.0, -1.0, 0.0, 9.0])},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_query_by_itself(rule):
    given = arguments()
    torch.testing.assert_close(paged_attention(*given, **rule).double(), by_hand(*given, **rule), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    given = arguments(dtype=dtype, dv=24)
    out = paged_attention(*given)
    assert out.dtype == dtype
    error = (out.double() - by_hand(*given)).abs().max()
    assert error <= {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 1e-12}[dtype]


def test_whole_numbers_of_64_bits_and_other_strides():
    q, k, v, *tables = arguments()
    wanted = paged_attention(q, k, v, *tables)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    torch.testing.assert_close(paged_attention(q, k, v, *(x.long() for x in tables)), wanted)


def test_interpreted_kernel_gives_the_same():
    given = arguments((20, 9), (1, 1), d=128)
    with use_path("interpret"), record_paths() as ran:
        out = paged_attention(*given)
    assert [path for _, path in ran] == ["interpret"]
    torch.testing.assert_close(out, paged_attention(*given), rtol=1e-5, atol=1e-5)


def test_opcheck_and_one_graph():
    q, k, v, *tables = arguments()
    torch.library.opcheck(paged_attention_op.overload, (q, k, v, *tables, None, 0.25, True, -1, 0.0))
    compiled = torch.compile(paged_attention, backend="eager", fullgraph=True, dynamic=True)
    for given in (arguments(), arguments((5, 17), (2, 3))):
        torch.testing.assert_close(compiled(*given), paged_attention(*given))


@pytest.mark.parametrize("sizes", [{"lengths": (), "q_sizes": ()}, {"lengths": (4, 0), "q_sizes": (0, 0)}], ids=str)
def test_no_queries(sizes):
    assert paged_attention(*arguments(**sizes)).shape == (0, 4, 16)


def test_rows_past_the_last_sequence_are_zero():
    q, *others = arguments()
    out = paged_attention(torch.cat([q, torch.ones(2, 4, 16)]), *others)
    assert (out[-2:] == 0).all()


def changed(place: int, make) -> list:
    given = arguments()
    given[place] = make(given[place])
    return given


def set_to(tensor, at, value):
    tensor[at] = value
    return tensor


REFUSED = [
    (changed(0, lambda q: q[None]), r"q must be \(total_q, hq, d\); got \(1, 7, 4, 16\). Try q.flatten\(0, 1\)"),
    (changed(0, lambda q: q[:, :3]), r"hq must be a multiple of hk.* got hq = 3, hk = 2"),
    (changed(1, lambda k: k[..., :8]), r"k_pages must have d = 16 like q \(7, 4, 16\); got \(17, 8, 2, 8\)"),
    (changed(2, lambda v: v[:-1]), r"v_pages must have pages = 17 like k_pages"),
    (changed(3, lambda n: set_to(n, 1, 33)), r"every sequence must have 0 \.\.\. 32 keys.* got 33 in sequence 1"),
    (changed(3, lambda n: set_to(n, 0, -1)), r"got -1 in sequence 0"),
    (changed(4, lambda t: t[:3]), r"page_table must be \(sequences, most pages\) = \(4, most pages\); got \(3, 4\)"),
    (changed(4, lambda t: set_to(t, (2, 1), 17)), r"pages 0 \.\.\. num_pages - 1 = 16 .* got 17 in page_table\[2, 1\]"),
    (changed(4, lambda t: set_to(t, (0, 0), -1)), r"got -1 in page_table\[0, 0\]"),
    (changed(5, lambda c: c[:-1]), r"cu_seqlens_q must be \(n \+ 1,\) = \(5,\); got \(4,\)"),
    (changed(5, lambda c: set_to(c, 4, 9)), r"from 0 to at most total_q = 7; got cu_seqlens_q\[-1\] = 9"),
    (changed(5, lambda c: set_to(c, 1, 6)), r"must not decrease; got cu_seqlens_q\[2\] = 5 after 6"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refused(given, words):
    with pytest.raises(ValueError, match=f"paged_attention: .*{words}"):
        paged_attention(*given)


def test_other_refusals():
    q, k, v, *tables = arguments()
    with pytest.raises(ValueError, match=r"sinks must be \(hq,\) = \(4,\), one per head of q; got \(2,\)"):
        paged_attention(q, k, v, *tables, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match=r"window_left must be a count of keys, or -1 for no limit; got -2"):
        paged_attention(q, k, v, *tables, window_left=-2)
    with pytest.raises(ValueError, match=r"softcap must be above 0"):
        paged_attention(q, k, v, *tables, softcap=-1.0)
    with pytest.raises(TypeError, match=r"page_table is float32; supported: int32, int64"):
        paged_attention(q, k, v, tables[0], tables[1].float(), tables[2])
    with pytest.raises(TypeError, match=r"k_pages must have the dtype of q, float32; got bfloat16"):
        paged_attention(q, k.bfloat16(), v, *tables)
    with pytest.raises(RuntimeError, match=r"has no gradient, and one is needed. Call it under torch.no_grad"):
        paged_attention(q.requires_grad_(), k, v, *tables)
    half = [x.detach().half() for x in (q, k, v)]
    with use_path("interpret"), pytest.raises(TypeError, match=r"q is float16; supported by the kernel: float32, bf"):
        paged_attention(*half, *tables)


def tiny_model(implementation: str):
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize(("implementation", "beams"), [("sdpa", 1), ("eager", 3)])
def test_generate_gives_the_same_tokens(implementation, beams):
    pytest.importorskip("transformers")
    model = tiny_model(implementation)
    ids = torch.randint(1, 50, (3, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    cache = PagedKVCache(page_size=4)
    assert torch.equal(
        model.generate(ids, past_key_values=cache, **options).cpu(), model.generate(ids, **options).cpu()
    )
    assert (cache.get_seq_length(), len(cache)) == (18, 2)
    layer = cache.layers[0]
    assert sum(layer.uses) == sum(len(row) for row in layer.rows) == 3 * beams * 5
    if beams > 1:  # what beams have in common lies in common pages
        assert sum(use > 0 for use in layer.uses) < 3 * beams * 5


def filled(b=2, length=6, page_size=4, num_pages=None):
    cache, states = PagedKVCache(page_size, num_pages), torch.randn(2, b, 2, length, 16)
    return cache, states, cache.update(*states, 0)


def test_the_cache_gives_back_what_it_was_given():
    cache, (keys, values), (k, v) = filled()
    more = torch.randn(2, 2, 2, 3, 16)
    assert isinstance(k, InPages)
    torch.testing.assert_close(k.whole(), keys)
    k, v = cache.update(*more, 0)
    assert k.shape == (2, 2, 9, 16)
    torch.testing.assert_close(k + 0, torch.cat([keys, more[0]], 2))
    torch.testing.assert_close(v.transpose(1, 2)[:, 2:5], torch.cat([values, more[1]], 2).transpose(1, 2)[:, 2:5])


def test_sequences_that_share_a_page_part_when_they_write():
    cache, (keys, _), _ = filled()
    cache.batch_repeat_interleave(2)
    assert sum(use > 0 for use in cache.layers[0].uses) == 4
    more = torch.randn(2, 4, 2, 1, 16)
    k, _ = cache.update(*more, 0)
    assert sum(use > 0 for use in cache.layers[0].uses) == 6  # the full pages are still shared
    torch.testing.assert_close(k.whole(), torch.cat([keys.repeat_interleave(2, 0), more[0]], 2))
    cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
    k, _ = cache.update(*torch.zeros(2, 4, 2, 0, 16), 0)
    torch.testing.assert_close(k.whole(), torch.cat([keys.repeat_interleave(2, 0), more[0]], 2)[[3, 3, 0, 1]])


def test_crop_select_and_reset_give_pages_back():
    cache, (keys, _), _ = filled(b=3, length=9)
    cache.crop(-4)
    cache.batch_select_indices(torch.tensor([False, True, True]))
    k, _ = cache.update(*torch.zeros(2, 2, 2, 0, 16), 0)
    torch.testing.assert_close(k.whole(), keys[1:, :, :5])
    assert sum(cache.layers[0].uses) == 4
    cache.reset()
    assert (cache.get_seq_length(), sum(cache.layers[0].uses)) == (0, 0)
    assert sorted(cache.layers[0].free) == list(range(len(cache.layers[0].uses)))


def test_what_the_cache_refuses():
    with pytest.raises(ValueError, match=r"page_size must be a whole number above 0; got 0"):
        PagedKVCache(page_size=0)
    cache, states, _ = filled(num_pages=4)
    with pytest.raises(ValueError, match=r"2 sequences need up to 3 pages of 4 tokens each, there are 4. Raise num_p"):
        cache.update(*torch.zeros(2, 2, 2, 3, 16), 0)
    with pytest.raises(ValueError, match=r"of b = 2 sequences; got b = 3"):
        cache.update(*torch.zeros(2, 3, 2, 1, 16), 0)
    with pytest.raises(RuntimeError, match=r"is for inference, and a gradient is needed"):
        cache.update(*states.requires_grad_(), 0)
    with pytest.raises(TypeError, match=r"this model has states of other kinds. Use DynamicCache"):
        cache.update_conv_state(None, 0)
    with pytest.raises(ValueError, match=r"crop takes a number of tokens to remove, below 0; got 3"):
        cache.crop(3)


def test_the_kernel_reads_the_cache_where_it_lies():
    _, (keys, values), (k, v) = filled(length=9, page_size=8)
    q = torch.randn(2, 3, 4, 16)
    given = (q, k.transpose(1, 2), v.transpose(1, 2), None, (None, 0), 0.0, None)
    assert attend_in_pages(*given) is None  # torch code runs here, which gathers
    with use_path("interpret"), record_paths() as ran:
        out = attend_in_pages(*given)
    assert len(ran) == 1
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=torch.ones(3, 9, dtype=torch.bool).tril(6), enable_gqa=True
    )
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert attend_in_pages(q, keys.transpose(1, 2), values.transpose(1, 2), None, (None, 0), 0.0, None) is None


def test_a_cache_in_pages_is_read_where_it_lies_and_appended_to():
    q, k_pages, v_pages, lengths, table, _ = arguments((20, 9), (1, 1))
    k, v = torch.randn(2, 1, *k_pages.shape[2:]), torch.randn(2, 1, *v_pages.shape[2:])
    options = {"cache_seqlens": lengths, "block_table": table, "causal": True, "window_size": (6, 0)}
    caches = [(k_pages.clone(), v_pages.clone()) for _ in range(2)]
    with use_path("torch"):
        wanted = flash_attn_with_kvcache(q[:, None], *caches[0], k, v, **options)
    with use_path("interpret"), record_paths() as ran:
        got = flash_attn_with_kvcache(q[:, None], *caches[1], k, v, **options)
    assert [(op.rpartition("::")[2], path) for op, path in ran] == [("paged_attention", "interpret")]
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_tensor_in_pages_is_as_contiguous_as_it_says():
    _, (keys, _), (k, _) = filled(length=5, page_size=4)
    assert k.is_contiguous()
    assert torch.equal(k.view(-1), keys.contiguous().view(-1))
    rows = k.transpose(1, 2).contiguous()
    assert torch.equal(rows.view(-1), keys.transpose(1, 2).contiguous().view(-1))


def test_pages_that_fill_no_registers_are_gathered():
    q, k_pages, v_pages, lengths, table, _ = arguments((3, 2), (1, 1), hq=1, hk=1, page=4)
    options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    with use_path("torch"):
        wanted = flash_attn_with_kvcache(q[:, None], k_pages, v_pages, **options)
    with use_path("interpret"):
        got = flash_attn_with_kvcache(q[:, None], k_pages, v_pages, **options)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
