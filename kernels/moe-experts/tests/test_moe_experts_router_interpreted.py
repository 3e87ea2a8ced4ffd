"""The router's kernel, interpreted, against a loop over tokens in float64.

Memory a kernel has not written reads as NaN and data races are detected, so a block that no step writes fails here.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from moe_experts_router_checks import ROUTES, Route, inputs_of, loop, tolerance

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from moe_experts import router_reference  # noqa: E402
from moe_experts.router_kernel import block_of, router_topk_forward  # noqa: E402

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
OPTIONS = tuple(Route(1, 1, 1).options)
CODE = {
    "kernel": jax.jit(functools.partial(router_topk_forward, interpret=STRICT), static_argnames=OPTIONS),
    "reference": jax.jit(router_reference.router_topk, static_argnames=OPTIONS),
}
both = pytest.mark.parametrize("code", CODE)


@pytest.fixture(autouse=True)
def no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    yield
    races = interpret_pallas_call.races
    assert races is None or not races.races_found


def assert_routes(code: str, route: Route, seed: int = 0) -> None:
    logits, bias = inputs_of(route, seed)
    given = (jnp.asarray(logits, route.dtype), None if bias is None else jnp.asarray(bias))
    weights, index = CODE[code](*given, **route.options)
    assert (weights.shape, weights.dtype, index.dtype) == ((route.t, route.top_k), route.dtype, jnp.int32)
    wanted_weights, wanted_index = loop(route, logits, bias)
    np.testing.assert_array_equal(index, wanted_index)
    atol = tolerance(route, float(jnp.finfo(route.dtype).eps))
    np.testing.assert_allclose(np.asarray(weights, np.float64), wanted_weights, rtol=0, atol=atol)


@both
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.id)
def test_equals_a_loop_over_tokens(code, route):
    assert_routes(code, route)


@pytest.mark.parametrize(
    "route", [Route(129, 8, 2), Route(300, 5, 1, bias=True), Route(1030, 8, 1)], ids=lambda r: r.id
)
def test_partial_last_block_is_written(route):
    assert route.t % block_of(route.t, route.e)
    assert_routes("kernel", route)


@both
def test_no_tokens(code):
    weights, index = CODE[code](jnp.zeros((0, 4), jnp.bfloat16), top_k=3)
    assert (weights.shape, index.shape, weights.dtype) == ((0, 3), (0, 3), jnp.bfloat16)


@both
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_ties_go_to_the_lowest_index(code, score):
    logits = jnp.array([[0.0] * 20, [0.0, -0.0] * 10, [-jnp.inf] * 17 + [1.0] * 3, [-1.0] * 18 + [2.0] * 2])
    index = CODE[code](logits, top_k=5, score=score)[1][jnp.array([0, 2, 3])]
    np.testing.assert_array_equal(index, [[0, 1, 2, 3, 4], [17, 18, 19, 0, 1], [18, 19, 0, 1, 2]])


def test_zeros_of_both_signs_tie_in_the_kernel():
    index = CODE["kernel"](jnp.array([[-0.0, 0.0, -0.0, 0.0]]), top_k=3, score="topk_softmax")[1]
    np.testing.assert_array_equal(index, [[0, 1, 2]])


@both
def test_nan_is_the_largest_sigmoid(code):
    logits = jnp.array([[0.0, 1.0, jnp.nan, 2.0, -1.0, 0.5], [0.0, 1.0, 3.0, 2.0, jnp.inf, -jnp.inf]])
    weights, index = CODE[code](logits, top_k=3, score="sigmoid")
    np.testing.assert_array_equal(index, [[2, 3, 1], [4, 2, 3]])
    np.testing.assert_allclose(weights, [[jnp.nan, 0.880797, 0.731059], [1.0, 0.952574, 0.880797]], rtol=1e-5)
    limited = CODE[code](logits, top_k=2, score="sigmoid", groups=2, top_groups=1)[1]
    np.testing.assert_array_equal(limited, [[2, 1], [4, 3]])  # the group with the NaN


@both
@pytest.mark.parametrize("row", [[0.0, jnp.nan, 1.0, 2.0], [-jnp.inf] * 4, [0.0, jnp.inf, 1.0, 2.0]], ids=str)
def test_a_softmax_that_is_nan_is_nan_in_all_weights(code, row):
    weights, index = CODE[code](jnp.array([row, [0.0, 1.0, 2.0, 3.0]]), top_k=3, renormalize=True)
    assert np.isnan(weights[0]).all()
    assert len(set(index[0].tolist()) & set(range(4))) == 3
    np.testing.assert_array_equal(index[1], [3, 2, 1])  # other tokens are not touched
    np.testing.assert_allclose(weights[1], [0.665241, 0.244728, 0.090031], rtol=1e-5)


@both
def test_weights_that_are_all_zero_stay_zero(code):
    weights, _ = CODE[code](jnp.full((2, 6), -jnp.inf), top_k=2, score="sigmoid", renormalize=True)
    np.testing.assert_array_equal(weights, 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_logits_give_what_the_reference_gives(dtype):
    logits = jax.random.normal(jax.random.key(0), (40, 72), dtype)
    bias = jax.random.normal(jax.random.key(1), (72,)) * 0.1
    options = {"top_k": 6, "score": "sigmoid", "renormalize": True, "groups": 9, "top_groups": 4}
    (weights, index), (wanted, wanted_index) = (CODE[code](logits, bias, **options) for code in CODE)
    np.testing.assert_array_equal(index, wanted_index)
    atol = 4 * float(jnp.finfo(dtype).eps) if dtype == "float32" else float(jnp.finfo(dtype).eps)  # of weights below 1
    np.testing.assert_allclose(weights.astype(jnp.float32), wanted.astype(jnp.float32), rtol=0, atol=atol)
