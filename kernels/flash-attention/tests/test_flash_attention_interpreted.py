"""The Pallas kernels, interpreted, against the plain reference and its gradients by JAX.

Memory a kernel has not written reads as NaN and data races are detected, so a block that no visit writes, or a key that
is not there, fails here.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from flash_attention import backward as backward_module  # noqa: E402
from flash_attention import reference  # noqa: E402
from flash_attention.cases import EDGE_CASES, Case  # noqa: E402
from flash_attention.config import Config  # noqa: E402
from flash_attention.kernel import attention_backward, attention_forward  # noqa: E402
from flash_attention.visits import (  # noqa: E402
    FIRST,
    FIRST_OF_ROWS,
    LAST,
    LAST_OF_ROWS,
    MASKED,
    batch_of,
    key_block_of,
    row_block_of,
    visits_by_keys,
    visits_by_rows,
)
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
SMALL = Config(block_q=128, block_k=128, chunk=128)  # several blocks even at test sizes


@pytest.fixture(autouse=True)
def no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


def inputs(case: Case, dtype: str = "float32"):
    """q, k, v, lo, hi, bias, slopes, sinks."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.standard_normal(shape), jnp.float32)

    q, k, v = (
        normal(case.b, length, heads, d).astype(dtype)
        for length, heads, d in (
            (case.lq, case.hq, case.d),
            (case.lk, case.hk, case.d),
            (case.lk, case.hk, case.value_dim),
        )
    )
    rows = np.array([case.interval(row) for row in range(case.lq)], np.int32).reshape(-1, 2)
    lo, hi = (jnp.broadcast_to(jnp.asarray(x), (case.b, case.lq)) for x in rows.T)
    bias = normal(*case.bias) if case.bias else None
    slopes = jnp.exp2(-1.0 - jnp.arange(case.hq)) if case.slopes else None
    return q, k, v, lo, hi, bias, slopes, normal(case.hq) if case.sinks else None


def run(case: Case, arrays, config: Config | None):
    """out, lse, their random gradients, and the gradients of q, k, v, bias, sinks."""
    options = {"scale": case.d**-0.5, "softcap": case.softcap, "config": config, "interpret": STRICT}
    out, lse = jax.jit(functools.partial(attention_forward, **options))(*arrays)
    draw = np.random.default_rng(1)
    dout = jnp.asarray(draw.standard_normal(out.shape), out.dtype)
    dlse = jnp.where(jnp.isneginf(lse), 0, jnp.asarray(draw.standard_normal(lse.shape), jnp.float32))
    gradients = jax.jit(functools.partial(attention_backward, **options))(*arrays, out, lse, dout, dlse)
    return out, lse, dout, dlse, gradients


def wanted(case: Case, arrays, dout, dlse):
    q, k, v, lo, hi, bias, slopes, sinks = arrays

    def total(q, k, v, bias, sinks):
        out, lse = reference.attention(q, k, v, lo, hi, bias, slopes, sinks, case.d**-0.5, case.softcap)
        dot = jnp.sum(out * dout.astype(jnp.float32)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) * dlse)
        return dot, (out, lse)

    given_to = [None if x is None else x.astype(jnp.float32) for x in (q, k, v, bias, sinks)]
    asked = [i for i, x in enumerate(given_to) if x is not None]
    gradients, (out, lse) = jax.grad(total, argnums=asked, has_aux=True)(*given_to)
    return out, lse, dict(zip(asked, gradients, strict=True))


def check(case: Case, dtype: str = "float32", config: Config | None = SMALL):
    arrays = inputs(case, dtype)
    out, lse, dout, dlse, gradients = run(case, arrays, config)
    true_out, true_lse, true_gradients = wanted(case, arrays, dout, dlse)
    # A result is rounded once to its dtype; q, scaled, and the probabilities once more each before they are multiplied.
    error = {"float32": 2e-5, "bfloat16": 3 * 2**-8, "float16": 2**-10}[dtype]
    assert out.dtype == jnp.dtype(dtype)
    close(out, true_out, error)
    seen = np.isfinite(true_lse)
    assert (np.isneginf(np.asarray(lse)) == ~seen).all()
    close(np.asarray(lse)[seen], np.asarray(true_lse)[seen], error)
    for i, true in true_gradients.items():
        close(gradients[i], true, error)


def close(got, true, error):
    got, true = np.asarray(got, np.float64), np.asarray(true, np.float64)
    np.testing.assert_allclose(got, true, rtol=0, atol=error * max(1.0, np.abs(true).max(initial=0)))


SLOWER = [pytest.param(case, marks=pytest.mark.slow) for case in (EDGE_CASES[1], EDGE_CASES[2], *EDGE_CASES[4:6])]


@pytest.mark.parametrize("case", [EDGE_CASES[0], EDGE_CASES[3], *EDGE_CASES[6:], *SLOWER], ids=lambda case: case.id)
def test_matches_reference(case):
    check(case)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_narrow_dtypes_and_chosen_blocks_match_reference(dtype):
    check(EDGE_CASES[2], dtype, None)


def test_spans_of_rows_are_summed(monkeypatch):
    monkeypatch.setattr(backward_module, "rows_per_span", lambda group, d: 128)
    check(Case(300, 300, 2, 1, 16))


def test_chunks_of_one_head_and_heads_side_by_side_match_reference():
    check(Case(200, 200, 2, 1, 128), config=Config(block_q=256, block_k=128, chunk=128))


def test_nan_in_keys_that_nobody_sees_reaches_nothing():
    case = Case(40, 200, 1, 1, 16, right=-100)  # keys 60 and on are never seen
    q, k, v, *rest = inputs(case)
    clean = attention_forward(q, k, v, *rest, 0.25, 0.0, config=SMALL, interpret=STRICT)[0]
    k, v = k.at[:, 100:].set(jnp.nan), v.at[:, 100:].set(jnp.nan)
    out = attention_forward(q, k, v, *rest, 0.25, 0.0, config=SMALL, interpret=STRICT)[0]
    np.testing.assert_array_equal(out, clean)


def test_nothing_at_all():
    q, none = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 0, 1, 4))
    rows = jnp.zeros((1, 3), jnp.int32)
    out, lse = attention_forward(q, none, none, rows, rows, None, None, None, 1.0, 0.0)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()
    dq, dk, *_ = attention_backward(q, none, none, rows, rows, None, None, None, out, lse, q, None, 1.0, 0.0)
    assert not np.asarray(dq).any()
    assert dk.shape == none.shape


by_rows = jax.jit(visits_by_rows, static_argnums=(2, 3, 4))
by_keys = jax.jit(visits_by_keys, static_argnums=(2, 3, 4, 5))
intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=40, max_size=40)


@settings(max_examples=60, deadline=None)
@given(pairs=intervals, sort=st.booleans())
def test_visits_cover_what_rows_see(pairs, sort):
    """Whatever the intervals: each pair is visited once, unmasked only if all is seen, first and last are told."""
    lo, hi = np.array(pairs, np.int32).reshape(2, 20, 2).transpose(2, 0, 1)  # two batch entries of 20 rows
    if sort:
        lo, hi = np.sort(lo), np.sort(hi)
    block_q, block_k, lk, span = 8, 16, 50, 2
    rows, keys = by_rows(lo, hi, lk, block_q, block_k), by_keys(lo, hi, lk, block_q, block_k, span)
    for visits, outer in ((rows, "rows"), (keys, "keys")):
        v = jax.tree.map(np.asarray, visits)
        at = [
            (int(batch_of(r)), int(row_block_of(r)), int(key_block_of(k))) for r, k in zip(v.rows, v.keys, strict=True)
        ]
        at = at[: int(v.count)]
        flags = [int(k) for k in v.keys[: int(v.count)]]
        assert len(set(at)) == len(at)
        seen = lo[:, :, None] < hi[:, :, None]
        key = np.arange(64)
        seen = seen & (key >= lo[:, :, None]) & (key < hi[:, :, None])
        for b in range(2):
            for row in range(3):
                for block in range(4):
                    part = seen[b, row * block_q : (row + 1) * block_q, block * block_k : (block + 1) * block_k]
                    if part.any():
                        assert (b, row, block) in at
                    if (b, row, block) in at and not flags[at.index((b, row, block))] & MASKED:
                        assert part.all()
        if outer == "rows":
            groups = [(b, row) for b, row, _ in at]
        else:
            groups = [(b, row // span, block) for b, row, block in at]
        for i, group in enumerate(groups):
            assert bool(flags[i] & FIRST) == (i == 0 or groups[i - 1] != group)
            assert bool(flags[i] & LAST) == (i + 1 == len(groups) or groups[i + 1] != group)
    # In the backward kernel, blocks of rows are done one after the other, each announced until it is done.
    blocks = [(b, row) for b, row, _ in at]
    for i, block in enumerate(blocks):
        assert bool(flags[i] & FIRST_OF_ROWS) == (block not in blocks[:i])
        assert bool(flags[i] & LAST_OF_ROWS) == (block not in blocks[i + 1 :])
        if flags[i] & LAST_OF_ROWS:
            assert int(row_block_of(v.out[i])) == block[1]
    announced = [(b, int(row_block_of(o))) for (b, _), o in zip(blocks, v.out[: len(blocks)], strict=True)]
    changes = [a for i, a in enumerate(announced) if i == 0 or announced[i - 1] != a]
    assert len(set(changes)) == len(changes)  # never back to an earlier one
