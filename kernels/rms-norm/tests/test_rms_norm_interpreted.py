"""The Pallas kernels, interpreted with undefined memory as NaN and race detection, against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
jnp = jax.numpy

EPS = 1e-6
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ORDERS = ({}, {"float32_scale": True}, {"zero_centered": True})
SLOW = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
# Awkward sizes: one, primes, around a register of 128 columns and around tiles of 8, 16 and 32 rows.
ROWS = st.sampled_from([1, 7, 8, 9, 16, 17, 33, 40])
COLUMNS = st.sampled_from([1, 2, 100, 127, 128, 129, 255, 257, 300])


@pytest.fixture
def strict():
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)


def draw(seed: int, m: int, n: int, dtype: str, weight_dtype: str):
    rng = np.random.default_rng(seed)
    x, dy, residual = (rng.standard_normal((m, n)).astype(DTYPES[dtype]) for _ in range(3))
    return x, rng.standard_normal(n).astype(DTYPES[weight_dtype]), dy, residual


def exact(x, weight, *, zero_centered=False, float32_scale=False):
    """y in float64, without any rounding between."""
    x = x.astype(np.float64)
    unit = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
    return unit * (weight.astype(np.float64) + zero_centered)


def exact_gradients(x, weight, dy, *, zero_centered=False, float32_scale=False):
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
    g = dy * (weight.astype(np.float64) + zero_centered)
    dx = r * g - x * r**3 * np.mean(g * x, axis=-1, keepdims=True)
    return dx, np.sum(dy * x * r, axis=0), float(np.max(np.abs(r * g)))


def tolerance(dtype, roundings: int, n: int = 1) -> float:
    """Relative to the largest entry: each rounding costs half an eps, a float32 sum of n terms sqrt(n) of them."""
    return roundings * float(jnp.finfo(dtype).eps) / 2 + 4 * np.finfo(np.float32).eps * np.sqrt(n)


def assert_near(actual, expected, tol: float, scale: float = 1e-3):
    """`scale`: size of the terms that were subtracted to get `expected`, where they cancel."""
    actual = np.asarray(actual).astype(np.float64)
    scale = max(scale, float(np.max(np.abs(expected), initial=0.0)))
    error = float(np.max(np.abs(actual - expected), initial=0.0))
    assert np.isfinite(actual).all()
    assert error <= tol * scale, f"error {error} > {tol} * {scale}"


@SLOW
@given(ROWS, COLUMNS, st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES)), st.sampled_from(ORDERS))
def test_forward_matches_float64(part, strict, m, n, dtype, weight_dtype, order):
    x, weight, _, residual = draw(m * n, m, n, dtype, weight_dtype)
    y = part("kernel").rms_norm_forward(x, weight, eps=EPS, interpret=strict, **order)
    # The Llama order rounds x / rms(x) and the product, each by half an eps of x.dtype; the others round once.
    assert_near(y, exact(x, weight, **order), tolerance(DTYPES[dtype], 2.1, n))
    promoted = jnp.promote_types(x.dtype, weight.dtype)
    assert y.dtype == (x.dtype if order else promoted)

    y, total = part("kernel").rms_norm_residual_forward(x, residual, weight, eps=EPS, interpret=strict, **order)
    expected = np.asarray(jnp.asarray(x) + jnp.asarray(residual))
    np.testing.assert_array_equal(np.asarray(total), expected)
    assert_near(y, exact(expected, weight, **order), tolerance(DTYPES[dtype], 2.1, n))


@SLOW
@given(ROWS, COLUMNS, st.sampled_from(list(DTYPES)), st.sampled_from(ORDERS))
def test_backward_matches_float64(part, strict, m, n, dtype, order):
    x, weight, dy, dtotal = draw(m + n, m, n, dtype, dtype)
    dx, dweight, scale = exact_gradients(x, weight, dy, **order)
    # One rounding at the end; the sum over m rows of dweight is taken in float32.
    tol = tolerance(DTYPES[dtype], 1.1, max(m, n))
    got = part("kernel").rms_norm_backward(x, weight, dy, eps=EPS, interpret=strict, **order)
    assert_near(got[0], dx, tol, scale)
    assert_near(got[1], dweight, tol)
    got = part("kernel").rms_norm_residual_backward(x, weight, dy, dtotal, eps=EPS, interpret=strict, **order)
    assert_near(got[0], dx + dtotal.astype(np.float64), tol, scale)
    assert_near(got[1], dweight, tol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "n", "block_n"), [(9, 300, 128), (1, 256, 128)])
def test_cut_rows_match_whole_rows(part, strict, m, n, block_n, dtype):
    Config = part("config").Config
    x, weight, dy, residual = draw(3, m, n, dtype, dtype)
    cut = Config(min(m, 8), block_n, min(m, 8))
    run = part("kernel")  # both sides round twice, so they may be four roundings apart
    for name, args in (
        ("rms_norm_forward", (x, weight)),
        ("rms_norm_residual_forward", (x, residual, weight)),
        ("rms_norm_backward", (x, weight, dy)),
        ("rms_norm_residual_backward", (x, weight, dy, residual)),
    ):
        got = getattr(run, name)(*args, eps=EPS, config=cut, interpret=strict)
        whole = getattr(run, name)(*args, eps=EPS, interpret=strict)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
            assert_near(a, np.asarray(b).astype(np.float64), tolerance(DTYPES[dtype], 4.2, n))


@pytest.mark.parametrize("block_m", [8, 16, 40])
def test_several_steps_with_a_partial_last_block(part, strict, block_m):
    """Blocks of one, two and five tiles, the last partial: rows past m must reach neither y nor dweight."""
    Config = part("config").Config
    x, weight, dy, _ = draw(4, 44, 200, "float32", "float32")
    config = Config(block_m, 200, 8)
    y = part("kernel").rms_norm_forward(x, weight, eps=EPS, config=config, interpret=strict)
    assert_near(y, exact(x, weight), tolerance(np.float32, 2, 200))
    dx, dweight = part("kernel").rms_norm_backward(x, weight, dy, eps=EPS, config=config, interpret=strict)
    expected = exact_gradients(x, weight, dy)[:2]
    assert_near(dx, expected[0], tolerance(np.float32, 2, 200))
    assert_near(dweight, expected[1], tolerance(np.float32, 2, 200))


@pytest.mark.parametrize("block_m", [16, 24])
def test_many_columns_are_walked_by_a_loop(part, strict, monkeypatch, block_m):
    """Blocks of two tiles and of a single one, which has loops of its own."""
    tiles = part("tiles")
    monkeypatch.setattr(tiles, "UNROLLED_CHUNKS", 1)
    monkeypatch.setattr(tiles, "FEW_REGISTERS", 1)
    x, weight, dy, _ = draw(5, 24, 900, "float32", "float32")
    config = part("config").Config(block_m, 900, 8 if block_m == 16 else 24)
    y = part("kernel").rms_norm_forward(x, weight, eps=EPS, config=config, interpret=strict)
    assert_near(y, exact(x, weight), tolerance(np.float32, 2, 900))
    dx, dweight = part("kernel").rms_norm_backward(x, weight, dy, eps=EPS, config=config, interpret=strict)
    expected = exact_gradients(x, weight, dy)[:2]
    assert_near(dx, expected[0], tolerance(np.float32, 2, 900))
    assert_near(dweight, expected[1], tolerance(np.float32, 2, 900))


@pytest.mark.parametrize("kind", ["TPU v5", "TPU7x"])
def test_backward_of_one_generation(part, strict, monkeypatch, kind):
    """Two cores that share the steps, and float32 copies: blocks of three tiles, four of them, the last partial."""
    monkeypatch.setattr(part("kernel"), "device_kind", lambda: kind)
    monkeypatch.setattr(part("config"), "COPY_COLUMNS", (1, 300))
    x, weight, dy, _ = draw(7, 187, 300, "bfloat16", "bfloat16")
    config = part("config").Config(48, 300, 16)
    dx, dweight = part("kernel").rms_norm_backward(x, weight, dy, eps=EPS, config=config, interpret=strict)
    expected = exact_gradients(x, weight, dy)[:2]
    assert_near(dx, expected[0], tolerance(DTYPES["bfloat16"], 4.2, 300))
    assert_near(dweight, expected[1], tolerance(DTYPES["bfloat16"], 4.2, 300))


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (2, 0, 8)])
def test_empty(part, shape):
    x, weight = np.zeros(shape, np.float32), np.ones(shape[-1], np.float32)
    assert part("kernel").rms_norm_forward(x, weight, eps=EPS).shape == shape
    dx, dweight = part("kernel").rms_norm_backward(x, weight, x, eps=EPS)
    assert dx.shape == shape
    assert not np.asarray(dweight).any()


def test_scaling_x_leaves_result_unchanged(part):
    """With eps 0 a power of two cancels exactly."""
    x, weight, _, _ = draw(6, 9, 130, "float32", "float32")
    y, scaled = (part("kernel").rms_norm_forward(f * x, weight, eps=0.0, interpret=True) for f in (1, 8))
    np.testing.assert_array_equal(y, scaled)


def test_permuting_rows_permutes_result(part):
    x, weight, _, _ = draw(7, 19, 130, "bfloat16", "bfloat16")
    order = np.random.default_rng(0).permutation(19)
    y, permuted = (part("kernel").rms_norm_forward(rows, weight, eps=EPS, interpret=True) for rows in (x, x[order]))
    np.testing.assert_array_equal(np.asarray(y)[order], permuted)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: next(iter(order), "llama"))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_reference_matches_float64(part, dtype, order):
    x, weight, dy, _ = draw(8, 6, 100, dtype, dtype)
    y = part("reference").rms_norm(x, weight, eps=EPS, **order)
    assert_near(y, exact(x, weight, **order), tolerance(DTYPES[dtype], 2.1, 100))
    dx, dweight = part("reference").rms_norm_backward(x, weight, dy.astype(y.dtype), eps=EPS, **order)
    expected = exact_gradients(x, weight, dy, **order)
    # The reference rounds wherever the layer does: dy * weight, and dweight's terms, row by row.
    assert_near(dx, expected[0], tolerance(DTYPES[dtype], 4, 100))
    assert_near(dweight, expected[1], tolerance(DTYPES[dtype], 8, 100))
