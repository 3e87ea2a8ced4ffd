"""Values and gradients of every feature on the torch path, and that the ops are proper torch ops."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from flash_attention import flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention
from flash_attention._bridge import record_paths, use_path
from flash_attention.intervals import dense
from flash_attention.op import attention_backward_op, attention_op
from flash_attention.pieces import ALL, CAUSAL, MASKED, pieces
from flash_attention_truth import assert_close, attention, qkv, random, window
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = [(9, 9), (5, 12), (12, 5), (1, 7), (270, 300)]
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 2), (0, 0), (1, 40)]


def _features():
    """All combinations of the small ones, and with each the next of the larger lists."""
    shapes, windows = itertools.cycle(LENGTHS), itertools.cycle(WINDOWS)
    for softcap, alibi, bias, sinks, dv in itertools.product([0.0, 2.0], [0, 1], [0, 1], [0, 1], [8, 4]):
        yield pytest.param(*next(shapes), next(windows), softcap, alibi, bias, sinks, dv)


@pytest.mark.parametrize(("lq", "lk", "window_size", "softcap", "alibi", "bias", "sinks", "dv"), [*_features()])
def test_all_features_together_with_their_gradients(lq, lk, window_size, softcap, alibi, bias, sinks, dv):
    b, hq, hk, d = 2, 4, 2, 8
    q, k, v = qkv(b, lq, lk, hq, hk, d, dv, dtype=torch.float64, grad=True)
    rows = lq if lq % 2 else 1
    bias = random(1, hq, rows, lk, dtype=torch.float64, grad=True) if bias else None
    slopes = random(b, hq, dtype=torch.float64, seed=4).abs() if alibi else None
    sinks = random(hq, dtype=torch.float64, grad=True) if sinks else None
    limits = tuple(None if size < 0 else size for size in window_size)
    lo, hi, diagonal = dense(q, lk, limits, lk - lq)
    out, lse = attention_op(q, k, v, lo, hi, bias, slopes, sinks, diagonal if alibi else None, 0.3, softcap)

    added = 0 if bias is None else bias
    if alibi:
        distance = (torch.arange(lq)[:, None] + lk - lq - torch.arange(lk)).abs()
        added = added - slopes[..., None, None] * distance
    seen = window(lq, lk, *window_size)
    wanted, wanted_lse = attention(q, k, v, seen, 0.3, softcap, added if torch.is_tensor(added) else None, sinks)
    assert_close(out, wanted, torch.float64, lk)
    finite = torch.isfinite(wanted_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    assert_close(lse[finite], wanted_lse[finite], torch.float64, lk)

    inputs = [x for x in (q, k, v, bias, sinks) if x is not None]
    upstream, upstream_lse = random(*out.shape, seed=8).double(), random(int(finite.sum()), seed=9).double()
    got = torch.autograd.grad((out, lse[finite]), inputs, (upstream, upstream_lse))
    other = torch.autograd.grad((wanted, wanted_lse[finite]), inputs, (upstream, upstream_lse))
    for one, two in zip(got, other, strict=True):
        assert_close(one, two.nan_to_num(), torch.float64, lk + b * lq)  # the truth's own softmax of nothing is NaN


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_window_and_padding(data):
    length = st.integers(0, 70)
    b, hk, group, d, dv = (data.draw(st.integers(1, most)) for most in (2, 3, 3, 9, 9))
    lq, lk = data.draw(length), data.draw(length)
    left, right = (data.draw(st.integers(-1, 80)) for _ in range(2))
    causal, softcap = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 1.5]))
    q, k, v = qkv(b, lq, lk, hk * group, hk, d, dv, dtype=torch.float64, grad=True)
    sinks = random(hk * group, dtype=torch.float64) if data.draw(st.booleans()) else None
    real = random(b, lk) > -1 if data.draw(st.booleans()) else None
    options = {"causal": causal, "window_size": (left, right), "softcap": softcap, "s_aux": sinks}
    out = flash_attn_func(q, k, v, **options, key_padding_mask=real)
    seen = window(lq, lk, left, 0 if causal else right)[None, None]
    seen = seen if real is None else seen & real[:, None, None]
    wanted = attention(q, k, v, seen, softcap=softcap, sinks=sinks)[0]
    assert_close(out, wanted, torch.float64, lk)
    upstream = random(*out.shape, seed=9).double()
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for one, other in zip(got, torch.autograd.grad(wanted, (q, k, v), upstream), strict=True):
        assert_close(one, other.nan_to_num(), torch.float64, lk + lq * group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"window_size": (20, 0)}, {"softcap": 3.0}, {"s_aux": True}], ids=str)
def test_the_error_is_that_of_torch_s_math_path(dtype, options):
    q, k, v = qkv(2, 100, 130, 4, 2, 32, dtype=dtype)
    sinks = random(4, dtype=dtype) if "s_aux" in options else None
    seen = window(100, 130, options.get("window_size", (-1, 0))[0], 0)
    got = flash_attn_func(q, k, v, causal=True, **{**options, **({"s_aux": sinks} if sinks is not None else {})})
    assert got.dtype == dtype
    wanted = attention(q, k, v, seen, softcap=options.get("softcap", 0.0), sinks=sinks)[0]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        math = F.scaled_dot_product_attention(*heads_first, seen, enable_gqa=True).transpose(1, 2)
    error_of_math = (math.double() - attention(q, k, v, seen)[0]).abs().max()
    # Sinks are a second rounding of the result.
    assert (got.double() - wanted).abs().max() <= 2 * error_of_math + 2 * torch.finfo(dtype).eps


def test_gradcheck():
    q, k, v = qkv(1, 3, 5, 2, 1, 4, dtype=torch.float64, grad=True)
    sinks = random(2, dtype=torch.float64, grad=True)
    for options in ({}, {"causal": True}, {"causal": True, "window_size": (1, 0), "softcap": 2.0}):
        assert torch.autograd.gradcheck(lambda *a, o=options: flash_attn_func(*a, **o), (q, k, v))
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: flash_attn_func(q, k, v, causal=True, s_aux=s, return_attn_probs=True)[:2], (q, k, v, sinks)
    )
    mask = random(2, 3, 5, dtype=torch.float64, grad=True)
    with use_path("torch"):
        heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in qkv(1, 3, 5, 2, 2, 4, dtype=torch.float64)]
        assert torch.autograd.gradcheck(scaled_dot_product_attention, (*heads_first, mask))


def test_a_second_gradient_of_the_op_is_refused():
    q, k, v = qkv(1, 3, 5, 2, 1, 4, grad=True)
    (first,) = torch.autograd.grad(flash_attn_func(q, k, v, softcap=1.0).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"attention_backward: has no gradient.*gradient of a gradient"):
        first.sum().backward()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, sinks):
    q, k, v = qkv(2, 3, 5, 4, 2, 8, dtype=dtype, grad=True)
    lo, hi, diagonal = dense(q, 5, (1, 0), 2)
    extra = (random(1, 4, 1, 5, dtype=dtype, grad=True), random(4, seed=4).abs(), random(4, dtype=dtype, grad=True))
    extra = (*extra, diagonal) if sinks else (None,) * 4
    torch.library.opcheck(attention_op.overload, (q, k, v, lo, hi, *extra, 0.3, 0.0))
    detached = [None if x is None else x.detach() for x in (q, k, v, lo, hi, *extra)]
    out, lse = attention_op(*detached, 0.3, 0.0)
    arguments = (*detached, out, lse, torch.ones_like(out), None, 0.3, 0.0, sinks)
    torch.library.opcheck(attention_backward_op.overload, arguments)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.0])
@pytest.mark.parametrize(
    ("b", "lq", "lk", "d", "dv"),
    [(0, 3, 3, 8, 8), (1, 0, 3, 8, 8), (1, 3, 0, 8, 8), (1, 0, 0, 8, 8), (1, 3, 3, 8, 0), (1, 3, 3, 0, 8)],
)
def test_empty(b, lq, lk, d, dv, softcap, causal):
    q, k, v = (x.requires_grad_() for x in (random(b, lq, 2, d), random(b, lk, 2, d), random(b, lk, 2, dv)))
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, softcap=softcap, return_attn_probs=True)
    plain = flash_attn_func(q, k, v, causal=causal, softcap=softcap)
    assert out.shape == plain.shape == (b, lq, 2, dv)
    assert_close(plain, out)
    if not lk:
        assert not out.any()
        assert torch.equal(lse, torch.full((b, 2, lq), float("-inf")))
    (out.sum() + plain.sum()).backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in (q, k, v))


STRANGE = {
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "lengths_last": lambda x: x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1),
    "every_other": lambda x: x.repeat_interleave(2, 1).repeat_interleave(2, 3)[:, ::2, :, ::2],
    "one_for_all_keys": lambda x: x[:, :1].expand_as(x),
    "one_for_all_values": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("options", [{}, {"window_size": (3, 1)}, {"softcap": 2.0, "causal": True}], ids=str)
@pytest.mark.parametrize("strange", STRANGE)
def test_any_strides(strange, options):
    tensors = [STRANGE[strange](x) for x in qkv(2, 9, 9, 4, 2, 8)]
    got = flash_attn_func(*tensors, **options)
    assert_close(got, flash_attn_func(*(x.contiguous() for x in tensors), **options), terms=9)


def test_segment_ids_are_sequences_packed_into_one_row():
    lengths = [3, 1, 5]
    q, k, v = qkv(2, 9, 9, 4, 2, 8)
    ids = torch.tensor([[7, 7, 7, 2, 9, 9, 9, 9, 9], [1] * 9])
    for causal in (False, True):
        got = flash_attn_func(q, k, v, causal=causal, segment_ids=ids)
        ends = torch.tensor([0, 3, 4, 9, 18])
        rows = (x.flatten(0, 1) for x in (q, k, v))
        wanted = flash_attn_varlen_func(*rows, ends, ends, max(lengths), max(lengths), causal=causal)
        assert_close(got.flatten(0, 1), wanted)
    one = flash_attn_func(*(x[:, :1] for x in (q, k, v)), segment_ids=ids[:, :1])
    assert_close(one, v[:, :1].repeat_interleave(2, 2))


PADDING = {
    "left_and_right": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]],
    "holes": [[0, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]],
    "none_real": [[0] * 7, [0, 0, 0, 1, 0, 0, 0]],
}


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_size": (3, 0), "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("padding", PADDING)
def test_padded_keys_are_seen_by_nobody(padding, options):
    real = torch.tensor(PADDING[padding])
    q, k, v = qkv(2, 5, 7, 4, 2, 8, grad=True)
    out = flash_attn_func(q, k, v, **options, key_padding_mask=real)
    left = options.get("window_size", (-1,))[0]
    seen = window(5, 7, left, 0 if "causal" in options else -1) & real.bool()[:, None, None]
    wanted = attention(q, k, v, seen, softcap=options.get("softcap", 0.0))[0]
    assert_close(out, wanted, terms=7)
    upstream = random(*out.shape, seed=9)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    for one, other in zip(got, torch.autograd.grad(wanted, (q, k, v), upstream.double()), strict=True):
        assert_close(one, other.nan_to_num(), terms=20)


@pytest.mark.parametrize("shape", [(9, 7), (4, 9, 7), (2, 1, 9, 7), (2, 4, 1, 7), (2, 4, 9, 7), (9, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_every_shape(kind, shape):
    q, k, v = (x.transpose(1, 2) for x in qkv(2, 9, 7, 4, 4, 8))
    mask = random(*shape) > -0.5 if kind == "bool" else random(*shape)
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(scaled_dot_product_attention(q, k, v, mask), wanted)
    with use_path("torch"):
        assert_close(scaled_dot_product_attention(q, k, v, mask), wanted, terms=7)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_any_number_of_leading_axes(lead):
    q, k, v = random(*lead, 4, 5, 8), random(*lead, 4, 7, 8, seed=1), random(*lead, 4, 7, 6, seed=2)
    for options in ({}, {"is_causal": True}, {"attn_mask": random(5, 7) > 0}):
        wanted = F.scaled_dot_product_attention(q, k, v, **options)
        with use_path("torch"):
            assert_close(scaled_dot_product_attention(q, k, v, **options), wanted, terms=7)


def test_sums_of_many_equal_scores_stay_exact():
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 5000, 1, 8), torch.ones(1, 5000, 1, 8)
    assert_close(flash_attn_func(q, k, v, softcap=1.0), torch.ones(1, 1, 1, 8), terms=5000)


def test_scores_far_from_zero():
    q, k, v = qkv(1, 4, 6, 1, 1, 8)
    for options in ({"softmax_scale": 1e4}, {"softmax_scale": -1e4, "causal": True}, {"softmax_scale": 0.0}):
        out = flash_attn_func(q, k, v, **options)
        seen = window(4, 6, right=0 if "causal" in options else -1)
        assert_close(out, attention(q, k, v, seen, options["softmax_scale"])[0], terms=6)


def test_autocast_computes_in_its_dtype_and_keeps_float32_gradients():
    q, k, v = qkv(1, 5, 7, 2, 2, 8, grad=True)
    for options in ({}, {"causal": True}):
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_attn_func(q, k, v, **options)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, flash_attn_func(*(x.bfloat16() for x in (q, k, v)), **options))
        grads = torch.autograd.grad(out.float().sum(), (q, k, v))
        assert {grad.dtype for grad in grads} == {torch.float32}


def test_what_torch_can_do_in_one_call_is_that_call_and_the_rest_is_the_op():
    q, k, v = qkv(1, 5, 5, 2, 1, 8)
    longer = qkv(1, 3, 5, 2, 1, 8)
    plain = [
        lambda: flash_attn_func(q, k, v),
        lambda: flash_attn_func(q, k, v, causal=True, window_size=(4, 4)),
        lambda: flash_attn_func(*longer),
        lambda: flash_attn_func(*longer, causal=True),
        lambda: flash_attn_func(q[:, :1], k, v, causal=True),
    ]
    ops = [
        lambda: flash_attn_func(q, k, v, causal=True, window_size=(3, 4)),
        lambda: flash_attn_func(*longer, causal=True, window_size=(1, 0)),
        lambda: flash_attn_func(q, k, v, softcap=1.0),
        lambda: flash_attn_func(q, k, v, return_attn_probs=True),
    ]
    called = []
    real, F.scaled_dot_product_attention = (
        F.scaled_dot_product_attention,
        lambda *a, **b: called.append(1) or real(*a, **b),
    )
    try:
        for call in plain:
            call()
        assert len(called) == len(plain)
        for call in ops:
            call()
        assert len(called) == len(plain)
    finally:
        F.scaled_dot_product_attention = real
    for call in plain + ops:
        with record_paths() as ran:
            call()
        assert [(name.partition("::")[2], path) for name, path in ran] == [("attention", "torch")]


def _kinds(lo, hi):
    tensors = torch.tensor([lo]), torch.tensor([hi])
    return [(p.rows.start, p.rows.stop, p.keys.start, p.keys.stop, p.kind) for p in pieces(*tensors)]


def test_pieces_read_no_more_than_their_rows_see():
    square = list(range(100))
    assert _kinds([0] * 100, [i + 1 for i in square]) == [(0, 100, 0, 100, CAUSAL)]
    assert _kinds([0] * 4, [9] * 4) == [(0, 4, 0, 9, ALL)]
    assert _kinds([0, 0, 0], [0, 1, 2]) == [(1, 3, 0, 2, CAUSAL)]  # the first row sees nothing
    # Two sequences of 70 rows each, then rows of none.
    lo, hi = [0] * 70 + [70] * 70 + [140] * 2, [70] * 70 + [140] * 70 + [140] * 2
    assert _kinds(lo, hi) == [(0, 70, 0, 70, ALL), (70, 140, 70, 140, ALL)]
    # Short ones together.
    assert _kinds([0, 0, 2, 2], [2, 2, 4, 4]) == [(0, 4, 0, 4, MASKED)]
    # A window of 10 over 600 rows.
    rows = range(600)
    assert _kinds([max(i - 9, 0) for i in rows], [i + 1 for i in rows]) == [
        (0, 256, 0, 256, MASKED),
        (256, 512, 247, 512, MASKED),
        (512, 600, 503, 600, MASKED),
    ]


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("options", [{}, {"s_aux": torch.zeros(2)}], ids=["plain", "sinks"])
def test_scales_at_which_torch_makes_nan_of_a_causal_mask(scale, options):
    q, k, v = qkv(1, 5, 5, 2, 2, 8)
    out = flash_attn_func(q, k, v, causal=True, softmax_scale=scale, **options)
    scores = (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1)) * scale
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), float("-inf"))
    if options:
        scores = torch.cat([scores, torch.zeros(1, 2, 5, 1)], -1)
    wanted = scores.softmax(-1)[..., :5] @ v.double().transpose(1, 2)
    torch.testing.assert_close(out.double(), wanted.transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_no_heads(softcap):
    q, k, v = (torch.ones(1, 3, 0, 4, requires_grad=True) for _ in range(3))
    out = flash_attn_func(q, k, v, softcap=softcap)
    out.sum().backward()
    assert out.shape == q.grad.shape == (1, 3, 0, 4)
