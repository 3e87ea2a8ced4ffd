"""The Pallas kernels, interpreted, against each token and each of its experts in float64.

Memory a kernel has not written reads as NaN and data races are detected, so a block that no step writes fails here.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_experts_checks import ACTIVATIONS, Layer, layer_of, loop, tolerance

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from moe_experts import reference  # noqa: E402
from moe_experts.cases import EDGE_CASES, Case  # noqa: E402
from moe_experts.config import DecodeConfig, PrefillConfig, Sizes  # noqa: E402
from moe_experts.gates import ACTIVATIONS as NAMES  # noqa: E402
from moe_experts.gates import Gating  # noqa: E402
from moe_experts.kernel import moe_experts_forward  # noqa: E402
from moe_experts.products import by_products  # noqa: E402
from moe_experts.routing import experts_in_use, sort_by_expert  # noqa: E402

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
ALL = ("activation", "gate", "limit", "transposed")


@pytest.fixture(autouse=True)
def no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


# Compiled once per shape: the routing is data, and compiling the interpreter costs more than running it.
forward = jax.jit(functools.partial(moe_experts_forward, interpret=STRICT), static_argnames=(*ALL, "config"))
plain = jax.jit(reference.moe_experts, static_argnames=ALL)


@functools.partial(jax.jit, static_argnames=("case",))
def products(*arguments, case: Case):
    """The variant for any sizes, whatever config.py would choose."""
    x, gate_up, down, index, weights, *biases = arguments
    biases = () if biases[0] is None else tuple(bias[:, None, :] for bias in biases)
    sizes = Sizes(case.t, case.h, case.w, case.i, case.e, case.top_k, case.transposed)
    gating = Gating(case.activation, case.gate, case.limit)
    weights = weights.astype(jnp.float32)
    return by_products(x, gate_up, down, index, weights, biases, sizes=sizes, gating=gating, interpret=STRICT)


def small_blocks(case: Case) -> DecodeConfig:
    """Several blocks and chunks even at test sizes."""
    return DecodeConfig(block_h=128 if case.h % 128 == 0 else case.h, chunk=128)


def prefill_blocks(case: Case, calls: int = 1, split: bool = False) -> PrefillConfig:
    """Several visits per expert, and the last of `calls` calls not full."""
    return PrefillConfig(tokens=-(-case.t // calls), block_m=32, chunk=128, split=split)


VARIANTS = {
    "decode": (forward, lambda case: {"config": small_blocks(case)}),
    "prefill": (forward, lambda case: {"config": prefill_blocks(case)}),
    "split-prefill": (forward, lambda case: {"config": prefill_blocks(case, split=True)}),
    "products": (products, lambda case: {}),
    "reference": (plain, lambda case: {}),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def as_jax(layer: Layer, dtype: str) -> tuple:
    def cast(part):
        return None if part is None else jnp.asarray(part, jnp.int32 if part is layer.index else dtype)

    return tuple(map(cast, layer.arguments()))


def run(case: Case, layer: Layer, dtype: str = "float32", function=forward, **options):
    """The result, and what the loop makes of the same rounded numbers."""
    arguments = as_jax(layer, dtype)
    if function is products:
        out = products(*arguments, case=case)
    else:
        names = {name: getattr(case, name) for name in ALL}
        out = function(*arguments, **names, **options)
    assert (out.shape, out.dtype) == ((case.t, case.h), jnp.dtype(dtype))
    rounded = Layer(*(None if part is None else np.asarray(part.astype(jnp.float32)) for part in arguments))
    return np.asarray(out, np.float64), loop(case, replace(rounded, index=layer.index))


def check(case: Case, layer: Layer | None = None, dtype: str = "float32", **options) -> None:
    out, wanted = run(case, layer or layer_of(case), dtype, **options)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=tolerance(case, float(jnp.finfo(dtype).eps), wanted))


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_edge_cases_match_loop(case):
    check(case, config=small_blocks(case))


@pytest.mark.parametrize("case", [EDGE_CASES[1], EDGE_CASES[5]], ids=lambda case: case.id)
def test_products_match_loop(case):
    check(case, function=products)


PREFILLED = [
    Case(34, 128, 128, 2, 2),  # two visits to each expert, the second not full
    Case(9, 256, 264, 3, 2, gate="interleaved", transposed=True, bias=True, activation="swiglu_oss", limit=1.0),
    Case(7, 128, 8, 4, 2, routed=8, gate="none", activation="relu2"),
]


@pytest.mark.parametrize("split", [False, True], ids=["one-kernel", "split"])
@pytest.mark.parametrize("case", PREFILLED, ids=lambda case: case.id)
def test_prefill_matches_loop(case, split):
    check(case, config=prefill_blocks(case, split=split))


@pytest.mark.parametrize(("calls", "split"), [(2, False), (6, True)], ids=["unrolled", "loop"])
def test_prefill_in_several_calls(calls, split):
    case = Case(11, 128, 8, 3, 2)  # the last call is not full
    check(case, config=prefill_blocks(case, calls, split))


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_reference_matches_loop(case):
    check(case, function=plain)


def test_bfloat16_is_no_worse_than_products():
    case = replace(PREFILLED[1], i=24)
    errors = {}
    for variant in ("decode", "prefill", "products"):
        function, options = VARIANTS[variant]
        out, wanted = run(case, layer_of(case), "bfloat16", function, **options(case))
        np.testing.assert_allclose(out, wanted, rtol=0, atol=tolerance(case, float(jnp.finfo("bfloat16").eps), wanted))
        errors[variant] = np.abs(out - wanted).mean()
    assert max(errors["decode"], errors["prefill"]) <= errors["products"]


def test_every_activation_has_a_float64_twin():
    x = np.linspace(-9, 9, 1001)
    assert set(NAMES) == set(ACTIVATIONS)
    for name, function in NAMES.items():
        got = np.asarray(function(jnp.asarray(x, jnp.float32)), np.float64)
        np.testing.assert_allclose(got, ACTIVATIONS[name](x), rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("gate", ["concatenated", "interleaved", "none"])
@pytest.mark.parametrize("width", [1, 12, 128, 300])
def test_gating_by_columns_equals_gating_at_once(gate, width):
    product = jnp.asarray(np.random.default_rng(0).standard_normal((5, width if gate == "none" else 2 * width)) * 4)
    gating = Gating("silu", gate, None if gate == "none" else 2.5)
    whole, size = gating.of(product), gating.chunk(product.shape[1])
    case = Case(5, 1, width, 1, 1, gate=gate, limit=gating.limit)
    wanted = ACTIVATIONS["silu"](np.asarray(product)) if gate == "none" else None
    if gate != "none":
        from moe_experts_checks import between

        wanted = np.stack([between(case, row) for row in np.asarray(product, np.float64)])
    np.testing.assert_allclose(whole, wanted, rtol=1e-5, atol=1e-6)
    for start in range(0, width, size):
        part = gating.columns_of(
            lambda columns: product[:, _plain(columns)], start, min(size, width - start), product.shape[1]
        )
        np.testing.assert_array_equal(part, whole[:, start : start + part.shape[1]])


def _plain(columns):
    return columns if isinstance(columns, slice) else slice(columns.start, columns.start + columns.size)


cases = st.builds(
    Case,
    t=st.integers(1, 20),
    h=st.integers(1, 300) | st.sampled_from([128, 256]),
    i=st.integers(1, 150) | st.sampled_from([128]),
    e=st.integers(1, 7),
    top_k=st.just(1),
    routed=st.sampled_from([0, 0, 9]),
    activation=st.sampled_from(sorted(set(NAMES) - {"swiglu_oss"})),
    gate=st.sampled_from(["concatenated", "interleaved", "none"]),
    bias=st.booleans(),
    transposed=st.booleans(),
)


@settings(max_examples=3, deadline=None)
@given(case=cases, data=st.data())
def test_any_sizes_match_loop(case, data):
    case = replace(case, top_k=data.draw(st.integers(1, case.routed or case.e), label="top_k"))
    check(case, config=small_blocks(case))


ONE_SHAPE = Case(6, 256, 16, 5, 3, bias=True)


@pytest.mark.parametrize("variant", ["decode", "prefill"])
@settings(max_examples=4, deadline=None)
@given(index=st.lists(st.integers(-2, 7) | st.just(3), min_size=18, max_size=18))
def test_any_routing_matches_loop(variant, index):
    """Also an expert twice for one token, and every way to say that no expert serves a slot."""
    check(ONE_SHAPE, layer_of(ONE_SHAPE, index=index), **VARIANTS[variant][1](ONE_SHAPE))


@pytest.mark.parametrize("variant", ["decode", "prefill"])
@pytest.mark.parametrize("expert", [0, 4])
def test_all_tokens_to_one_expert(expert, variant):
    check(ONE_SHAPE, layer_of(ONE_SHAPE, index=[expert] * 18), **VARIANTS[variant][1](ONE_SHAPE))


@variants
def test_without_served_slots_the_result_is_zero_whatever_there_is(variant):
    layer = layer_of(ONE_SHAPE, index=[5] * 18)
    for part in (layer.x, layer.gate_up, layer.down, layer.weights):
        part[...] = np.nan
    function, options = VARIANTS[variant]
    out, _ = run(ONE_SHAPE, layer, function=function, **options(ONE_SHAPE))
    assert not out.any()


@variants
def test_nan_reaches_only_what_it_belongs_to(variant):
    """Expert 1 is not used, expert 2 serves tokens 0 and 4, and row 4 of x is NaN itself."""
    index = [[0, 2, 3], [0, 3, 4], [3, 4, 5], [3, 4, 0], [4, 2, 2], [5, 5, 5]]
    layer = layer_of(ONE_SHAPE, index=index)
    function, options = VARIANTS[variant]
    clean, _ = run(ONE_SHAPE, layer, function=function, **options(ONE_SHAPE))
    for part in (layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias):
        part[1:3] = np.nan
    layer.x[4] = np.nan
    layer.weights[2, 2] = layer.weights[5] = np.nan  # of slots that no expert serves
    out, _ = run(ONE_SHAPE, layer, function=function, **options(ONE_SHAPE))
    assert np.isnan(out).all(axis=1).tolist() == [True, False, False, False, True, False]
    untouched = [1, 2, 3, 5]
    np.testing.assert_array_equal(out[untouched], clean[untouched])


@pytest.mark.parametrize("empty", ["t", "h", "e", "top_k"])
def test_empty_axes_give_zeros(empty):
    case = replace(ONE_SHAPE, **{empty: 0})
    layer = layer_of(case, index=np.zeros((case.t, case.top_k)))
    out, _ = run(case, layer) if empty != "e" else run(case, replace(layer, index=layer.index))
    assert out.shape == (case.t, case.h)
    assert not out.any()


def test_an_intermediate_size_of_zero_leaves_the_bias():
    case = Case(3, 16, 0, 4, 2, bias=True)
    check(case)


@settings(max_examples=100, deadline=None)
@given(index=st.lists(st.integers(0, 12), min_size=20, max_size=20))
def test_tables_of_experts_and_slots(index):
    e = 12  # and 12 itself: no expert
    flat = np.asarray(index)
    table, count = jax.tree.map(np.asarray, _in_use(jnp.asarray(index, jnp.int32).reshape(5, 4), e))
    used = sorted(set(index) - {e})
    assert int(count) == len(used)
    assert table[: len(used)].tolist() == used
    assert ((table >= 0) & (table < e)).all()
    order, experts, sizes = jax.tree.map(np.asarray, _sorted(jnp.asarray(index, jnp.int32).reshape(5, 4), e))
    assert sorted(order.tolist()) == list(range(20))
    assert experts.tolist() == sorted(index) == flat[order].tolist()
    assert sizes.tolist() == [index.count(expert) for expert in range(e)]
    assert all(a < b for a, b, same in zip(order, order[1:], np.diff(experts) == 0, strict=False) if same)


_in_use = jax.jit(experts_in_use, static_argnums=1)
_sorted = jax.jit(sort_by_expert, static_argnums=1)


def test_sorting_many_slots_gives_the_same_as_sorting_few():
    index = np.random.default_rng(0).integers(0, 9, (2**14, 4)).astype(np.int32)
    order, experts, sizes = _sorted(jnp.asarray(index), 9)
    few = _sorted(jnp.asarray(index[:-1]), 9)
    np.testing.assert_array_equal(experts, np.sort(index.reshape(-1)))
    np.testing.assert_array_equal(index.reshape(-1)[np.asarray(order)], experts)
    np.testing.assert_array_equal(np.asarray(order)[np.asarray(order) < index[:-1].size], few[0])
    assert int(sizes.sum()) == index.size


def test_reference_traces_with_symbolic_sizes():
    from jax import export
    from moe_experts import shapes

    t, h, i, e, top_k = export.symbolic_shape("t, h, i, e, top_k")
    array = jax.ShapeDtypeStruct
    arguments = (
        array((t, h), jnp.bfloat16),
        array((e, 2 * i, h), jnp.bfloat16),
        array((e, h, i), jnp.bfloat16),
        array((t, top_k), jnp.int32),
        array((t, top_k), jnp.float32),
    )
    for function in (reference.moe_experts, shapes.moe_experts):
        out = jax.eval_shape(function, *arguments)
        assert (out.shape, out.dtype) == ((t, h), jnp.bfloat16)
