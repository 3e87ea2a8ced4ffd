"""Quantised weights: the kernels, interpreted, against a loop in float64 over what data and scales stand for.

Memory a kernel has not written reads as NaN and data races are detected, as in test_moe_experts_interpreted.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from moe_experts_checks import loop, tolerance
from moe_experts_quantized_checks import FORMATS, Quantized, quantized_layer, value_of

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from moe_experts import quantized_blocks, reference, stored  # noqa: E402
from moe_experts.cases import Case  # noqa: E402
from moe_experts.config import DecodeConfig, PrefillConfig, ProductsConfig  # noqa: E402
from moe_experts.kernel import moe_experts_forward  # noqa: E402
from moe_experts.stored import Stored, stored_as  # noqa: E402

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
ALL = ("activation", "gate", "limit", "transposed")


@pytest.fixture(autouse=True)
def no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


forward = jax.jit(functools.partial(moe_experts_forward, interpret=STRICT), static_argnames=(*ALL, "config"))
plain = jax.jit(reference.moe_experts, static_argnames=ALL)

# Two blocks of h, and a last block of i that shares a scale among fewer rows; of 2 * i that does among fewer columns.
CASE = Case(5, 256, 192, 3, 2, transposed=True)
BIASED = Case(
    9, 256, 64, 4, 2, routed=6, transposed=True, bias=True, gate="interleaved", activation="swiglu_oss", limit=7.0
)


def run(case: Case, layer: Quantized, dtype: str, function=forward, **options):
    """The result, and what the loop makes of the same rounded numbers."""

    def cast(part):
        floats = part is not None and np.asarray(part).dtype in (np.float32, np.float64)
        return None if part is None else jnp.asarray(part, dtype) if floats else jnp.asarray(part)

    x, gate_up, down, index, weights, *biases = map(cast, layer.arguments()[:7])
    scales = map(jnp.asarray, layer.scales)
    names = {name: getattr(case, name) for name in ALL}
    out = function(x, gate_up, down, index, weights, *biases, *scales, **names, **options)
    assert (out.shape, out.dtype) == ((case.t, case.h), jnp.dtype(dtype))

    def back(part):
        return None if part is None else np.asarray(part.astype(jnp.float32))

    rounded = replace(
        layer.layer, x=back(x), weights=back(weights), gate_up_bias=back(biases[0]), down_bias=back(biases[1])
    )
    return np.asarray(out, np.float64), loop(case, rounded)


def check(case: Case, *formats: str, dtype: str = "float32", **options) -> None:
    out, wanted = run(case, quantized_layer(case, formats), dtype, **options)
    # Weights may be rounded to the dtype as well, before both products: that doubles what the tolerance counts.
    atol = 2 * tolerance(case, float(jnp.finfo(dtype).eps), wanted)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=atol)


def variant(name: str, case: Case):
    """Several blocks, chunks, visits and calls even at test sizes."""
    return {
        "decode": DecodeConfig(block_h=128, chunk=128),
        "prefill": PrefillConfig(tokens=case.t, block_m=16, chunk=128),
        "split-prefill": PrefillConfig(tokens=case.t, block_m=16, chunk=128, split=True),
        "products": ProductsConfig(),
    }[name]


# gate_up's and down's: every format once.
PAIRS = [
    ("int8", "fp8-tensor"),
    ("fp8-block", "int4"),
    ("int4-g32", "int8-tensor"),
    ("int4-column", "fp8-block"),
    ("int8-g64", "int4-g64"),
]


@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
def test_decode_matches_loop(formats):
    check(CASE, *formats, config=variant("decode", CASE))


@pytest.mark.parametrize(
    ("formats", "how"), [(PAIRS[1], "prefill"), (PAIRS[2], "prefill"), (PAIRS[1], "split-prefill")]
)
def test_prefill_matches_loop(formats, how):
    check(CASE, *formats, config=variant(how, CASE))


@pytest.mark.parametrize("formats", PAIRS[1:2], ids="-".join)
def test_products_match_loop(formats):
    check(CASE, *formats, config=variant("products", CASE))


@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
def test_reference_matches_loop(formats):
    check(replace(CASE, h=10, i=75), *formats, function=plain)


@pytest.mark.parametrize("how", ["decode", "prefill", "split-prefill", "products"])
def test_bfloat16_with_biases_and_pairs_matches_loop(how):
    check(BIASED, "int4-g32", "int8", dtype="bfloat16", config=variant(how, BIASED))


@pytest.mark.parametrize(("tokens", "formats"), [(1, ("fp8-block", "int4-g32")), (24, ("int4-g64", "int4-g32"))])
def test_groups_of_rows_for_one_token_and_for_many(tokens, formats):
    """Of 128 columns, which all share the scales of a block."""
    case = replace(CASE, t=tokens, i=64)
    check(case, *formats, dtype="bfloat16", config=variant("decode", case))


@pytest.mark.parametrize("kind", [None, "TPU7x"])
def test_every_byte_of_float8_counts(kind):
    """A zero with a sign is a zero, a subnormal number is not, and NaN makes NaN of its column alone."""
    data = np.zeros((256, 256), np.uint8)
    data[np.arange(256), np.arange(256)] = np.arange(256)
    data = data.view(jnp.float8_e4m3fn.dtype)
    scale = np.full((1, 1), 0.5, np.float32)
    form = quantized_blocks.for_device(Stored("fp8", stored.ALL, stored.ALL), kind)

    def body(x_ref, data_ref, scale_ref, out_ref):
        weight = quantized_blocks.Quantized(data_ref, scale_ref, form)
        columns = pl.ds(0, 256)
        out_ref[...] = weight.scaled(weight.times(x_ref[...], columns), columns)

    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    out = pl.pallas_call(body, out_shape=shape, interpret=STRICT)(jnp.eye(256, dtype=jnp.bfloat16), data, scale)
    wanted = np.eye(256) @ value_of(data[None], scale[None], FORMATS["fp8-tensor"], 256)[0]
    assert np.isnan(wanted).any(axis=0).sum() == 2
    np.testing.assert_array_equal(out, wanted)


RULES = [
    Stored("int8", rows, columns) for rows in (stored.ALL, *stored.GROUPS) for columns in (stored.ALL, 1, stored.SQUARE)
]


@pytest.mark.parametrize("rows", [129, 704])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.rows}x{rule.columns}")
def test_the_shape_of_a_scale_tells_who_shares_it(rule, rows):
    assert stored_as(np.dtype("int8"), (3, *rule.scale_shape(rows, 300)), rows, 300) == rule


def test_other_shapes_of_scales_are_refused():
    with pytest.raises(
        ValueError,
        match=r"a scale must be \(e, a, b\), a = 1 or ceil\(in / 32, 64 or 128\), b = 1, out or ceil\(out / 128\), "
        r"for a weight \(e, in, out\) = \(e, 256, 300\); got \(3, 5, 300\)",
    ):
        stored_as("uint8", (3, 5, 300), 256, 300)
