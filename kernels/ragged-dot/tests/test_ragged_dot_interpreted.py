"""The Pallas kernels, interpreted, against a float64 loop over groups.

Memory a kernel has not written reads as NaN and data races are detected, so a row that no visit writes, or a product
with rows that are not there, fails here.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from ragged_dot import reference  # noqa: E402
from ragged_dot.blocks import _float16_bits_to_float32  # noqa: E402
from ragged_dot.cases import EDGE_CASES, Case  # noqa: E402
from ragged_dot.config import Config  # noqa: E402
from ragged_dot.kernel import ragged_dot_forward, ragged_dot_weight_gradient  # noqa: E402
from ragged_dot.visits import row_bounds, visits_of_groups, visits_of_rows  # noqa: E402

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
SMALL_TILES = Config(block_m=16, block_k=128, block_n=128, chunk=128)  # several tiles even at test sizes
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


def inputs(case: Case, dtype: str, seed: int = 0, tail=np.nan):
    """lhs, rhs, grad with `tail` in the rows that belong to no group."""
    draw = np.random.default_rng(seed)
    lhs, rhs, grad = (
        draw.standard_normal(shape).astype(np.float32)
        for shape in ((case.m, case.k), (case.g, case.k, case.n), (case.m, case.n))
    )
    past = min(sum(max(size, 0) for size in case.group_sizes), case.m)
    lhs[past:] = tail
    grad[past:] = tail
    return tuple(jnp.asarray(x).astype(dtype) for x in (lhs, rhs, grad))


def groups_of_rows(case: Case):
    start = 0
    for group, size in enumerate(case.group_sizes):
        end = min(start + max(size, 0), case.m)
        yield group, slice(start, end)
        start = end


def loop_forward(case: Case, lhs, rhs):
    out = np.zeros((case.m, case.n))
    for group, rows in groups_of_rows(case):
        out[rows] = np.asarray(lhs[rows], np.float64) @ np.asarray(rhs[group], np.float64)
    return out


def loop_weight_gradient(case: Case, lhs, grad):
    out = np.zeros((case.g, case.k, case.n))
    for group, rows in groups_of_rows(case):
        out[group] = np.asarray(lhs[rows], np.float64).T @ np.asarray(grad[rows], np.float64)
    return out


def assert_close(actual, expected, dtype: str, terms: int):
    """Each result is a float32 sum of `terms` products of about 1, rounded once to `dtype`."""
    assert actual.dtype == jnp.dtype(dtype)
    summing = 4 * np.finfo(np.float32).eps * max(terms, 1)
    rounding = 0.51 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rounding, atol=summing)


# Compiled once per shape: the group sizes are data, and compiling the interpreter costs more than running it.
forward = jax.jit(functools.partial(ragged_dot_forward, interpret=STRICT), static_argnums=3, static_argnames="config")
weight_gradient = jax.jit(
    functools.partial(ragged_dot_weight_gradient, interpret=STRICT), static_argnums=3, static_argnames="config"
)


def check(case: Case, dtype: str, transpose: bool, config: Config | None):
    lhs, rhs, grad = inputs(case, dtype)
    sizes = jnp.asarray(case.group_sizes, jnp.int32)
    weights = rhs.swapaxes(1, 2) if transpose else rhs
    out = forward(lhs, weights, sizes, transpose, config=config)
    assert_close(out, loop_forward(case, lhs, rhs), dtype, case.k)
    gradient = weight_gradient(lhs, grad, sizes, transpose, config=config)
    gradient = gradient.swapaxes(1, 2) if transpose else gradient
    assert_close(gradient, loop_weight_gradient(case, lhs, grad), dtype, case.m)
    for group, size in enumerate(case.group_sizes):
        assert size > 0 or not np.asarray(gradient[group], np.float32).any()


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_small_tiles_match_loop(case):
    check(case, "float32", False, SMALL_TILES)


@pytest.mark.parametrize("case", [EDGE_CASES[5], EDGE_CASES[7]], ids=lambda case: case.id)
def test_transposed_matches_loop(case):
    check(case, "float32", True, SMALL_TILES)


@pytest.mark.parametrize("case", [EDGE_CASES[1], EDGE_CASES[10]], ids=lambda case: case.id)
def test_chosen_tiles_match_loop(case):
    check(case, "float32", False, None)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("case", [EDGE_CASES[5], EDGE_CASES[7]], ids=lambda case: case.id)
def test_narrow_dtypes_match_loop(case, dtype):
    check(case, dtype, False, SMALL_TILES)


def test_mixed_dtypes_give_the_dtype_of_lhs():
    case = EDGE_CASES[7]
    lhs, rhs, _ = inputs(case, "bfloat16")
    rhs32 = rhs.astype(jnp.float32)
    out = forward(lhs, rhs32, jnp.asarray(case.group_sizes, jnp.int32), False)
    assert_close(out, loop_forward(case, lhs, rhs32), "bfloat16", case.k)


@pytest.mark.parametrize("sizes", [(7, -2, 3), (20, 2**30, 2**31 - 1), (0, -5, 99)])
def test_sizes_that_op_would_refuse_are_clipped(sizes):
    check(Case(20, 7, 8, sizes), "float32", False, SMALL_TILES)


def test_nan_in_one_group_stays_in_its_rows():
    case = Case(24, 16, 16, (5, 11, 8))
    lhs, rhs, grad = inputs(case, "float32")
    lhs = lhs.at[6].set(jnp.nan)  # a row of group 1
    sizes = jnp.asarray(case.group_sizes, jnp.int32)
    out = forward(lhs, rhs, sizes, False, config=SMALL_TILES)
    assert np.flatnonzero(np.isnan(out).any(axis=1)).tolist() == [6]
    gradient = weight_gradient(lhs, grad, sizes, False, config=SMALL_TILES)
    assert np.flatnonzero(np.isnan(gradient).any(axis=(1, 2))).tolist() == [1]


group_sizes = st.lists(st.integers(0, 30) | st.just(0), min_size=6, max_size=6).map(tuple)


@settings(max_examples=10, deadline=None)
@given(sizes=group_sizes)
def test_any_sizes_match_loop(sizes):
    check(Case(45, 130, 24, sizes), "float32", False, SMALL_TILES)  # 3 row tiles, k in 2 parts


table_of_rows = jax.jit(visits_of_rows, static_argnums=(1, 2))
table_of_groups = jax.jit(visits_of_groups, static_argnums=(1, 2))


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(-3, 90) | st.just(0) | st.just(16), min_size=12, max_size=12),
    m=st.sampled_from([1, 16, 45, 200, 512]),  # few, since each is compiled
)
def test_visits_cover_every_row_and_group_once(sizes, m):
    block_m = 16
    case = Case(m, 1, 1, tuple(sizes))
    array = jnp.asarray(sizes, jnp.int32)
    rows = jax.tree.map(np.asarray, table_of_rows(array, m, block_m))
    owner, seen, tiles_read = np.full(m, -1), np.zeros(m, int), []
    for v in range(int(rows.count)):
        tile, (low, high) = int(rows.tile[v]), row_bounds(int(rows.rows[v]))
        assert v == 0 or tile - int(rows.tile[v - 1]) in (0, 1)
        assert high > 0 or v == 0 or int(rows.group[v]) == int(rows.group[v - 1])  # nothing new is read
        tiles_read.append(int(rows.source[v]))
        start = tile * block_m + low
        if high == 0:  # left over: everything from `low` on is cleared
            owner[start : (tile + 1) * block_m] = -1
            seen[start : (tile + 1) * block_m] += 1
        else:
            owner[start : tile * block_m + high] = int(rows.group[v])
            seen[start : tile * block_m + high] += 1
    expected = np.full(m, -1)
    for group, part in groups_of_rows(case):
        expected[part] = group
    assert (seen == 1).all()
    np.testing.assert_array_equal(owner, expected)
    assert len(set(tiles_read)) <= max(1, -(-int((expected >= 0).sum()) // block_m))

    groups = jax.tree.map(np.asarray, table_of_groups(array, m, block_m))
    count = int(groups.count)
    assert sorted(set(np.asarray(groups.group)[:count].tolist())) == list(range(len(sizes)))
    assert (np.diff(np.asarray(groups.group)[:count]) >= 0).all()
    for v in range(count):
        low, high = row_bounds(int(groups.rows[v]))
        start = int(groups.source[v]) * block_m
        assert (expected[start + low : start + high] == int(groups.group[v])).all()


@pytest.mark.parametrize("transpose", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("case", EDGE_CASES[::2], ids=lambda case: case.id)
def test_reference_matches_loop(case, transpose):
    lhs, rhs, grad = inputs(case, "float32")
    sizes = jnp.asarray(case.group_sizes, jnp.int32)
    out = reference.ragged_dot(lhs, rhs.swapaxes(1, 2) if transpose else rhs, sizes, transpose)
    assert_close(out, loop_forward(case, lhs, rhs), "float32", case.k)
    gradient = reference.ragged_dot_weight_gradient(lhs, grad, sizes, transpose)
    gradient = gradient.swapaxes(1, 2) if transpose else gradient
    assert_close(gradient, loop_weight_gradient(case, lhs, grad), "float32", case.m)


@pytest.mark.parametrize("transpose", [False, True], ids=["", "transposed"])
def test_reference_traces_with_symbolic_sizes(transpose):
    from jax import export

    m, k, n, g = export.symbolic_shape("m, k, n, g")
    weights = (g, n, k) if transpose else (g, k, n)
    array = jax.ShapeDtypeStruct
    sizes = array((g,), jnp.int32)
    out = jax.eval_shape(
        lambda a, b, s: reference.ragged_dot(a, b, s, transpose),
        array((m, k), jnp.bfloat16),
        array(weights, jnp.bfloat16),
        sizes,
    )
    assert (out.shape, out.dtype) == ((m, n), jnp.bfloat16)
    gradient = jax.eval_shape(
        lambda a, b, s: reference.ragged_dot_weight_gradient(a, b, s, transpose),
        array((m, k), jnp.bfloat16),
        array((m, n), jnp.bfloat16),
        sizes,
    )
    assert (gradient.shape, gradient.dtype) == (weights, jnp.bfloat16)


def test_every_float16_becomes_the_same_float32():
    bits = np.arange(2**16, dtype=np.uint16)
    decoded = _float16_bits_to_float32(jnp.asarray(bits.view(np.int16).astype(np.int32)))
    decoded = np.asarray(decoded)
    np.testing.assert_array_equal(decoded, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(bits.view(np.float16)))
