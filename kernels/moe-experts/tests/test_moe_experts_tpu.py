"""The kernels compiled for real TPUs by libtpu's compiler: compiled, not run."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu")
import jax.numpy as jnp  # noqa: E402
from moe_experts.cases import EDGE_CASES, MODEL_CASES, MODELS, QWEN, Case  # noqa: E402
from moe_experts.config import MIB, DecodeConfig, PrefillConfig, Sizes, choose, choose_decode  # noqa: E402
from moe_experts.kernel import moe_experts_forward  # noqa: E402

from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu  # noqa: E402

targets = pytest.mark.parametrize("target", TARGETS)
# One block of h that ends within a register, chunks of it and of w that do too.
UNALIGNED = [Case(33, 1000, 700, 3, 2, bias=True), Case(8, 1300, 640, 3, 2, transposed=True, gate="interleaved")]


def sizes_of(case: Case) -> Sizes:
    return Sizes(case.t, case.h, case.w, case.i, case.e, case.top_k, case.transposed)


DECODE = [case for case in MODEL_CASES if isinstance(choose(sizes_of(case), 2), DecodeConfig)]
# In one call and in several; few, since sorting that many slots takes ten seconds to compile.
PREFILL = [QWEN.case(4096, experts_here=16), MODELS[1].case(4096)]
PRODUCTS = [
    Case(300, 130, 72, 4, 2, bias=True, gate="interleaved"),
    Case(300, 128, 64, 4, 2, routed=8, transposed=True),
]


def compile_case(case: Case, dtype: str, target: str, config=None):
    array = jax.ShapeDtypeStruct
    first, second = case.weight_shapes
    arguments = [
        array((case.t, case.h), dtype),
        array(first, dtype),
        array(second, dtype),
        array((case.t, case.top_k), jnp.int32),
        array((case.t, case.top_k), dtype),
    ]
    if case.bias:
        arguments += [array((case.e, case.w), dtype), array((case.e, case.h), dtype)]
    compiled = compile_for_tpu(
        moe_experts_forward,
        *arguments,
        target=target,
        activation=case.activation,
        gate=case.gate,
        limit=case.limit,
        transposed=case.transposed,
        config=config,
    )
    assert compiled.memory_analysis().output_size_in_bytes >= case.t * case.h * jnp.dtype(dtype).itemsize
    return compiled


@targets
@pytest.mark.parametrize("case", [*DECODE, QWEN.case(300, experts_here=16)], ids=lambda case: case.id)
def test_model_sizes_compile(case, target):
    compile_case(case, "bfloat16", target)


@pytest.mark.slow
@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.id)
def test_many_tokens_compile(case):
    assert isinstance(choose(sizes_of(case), 2, "TPU v6 lite"), PrefillConfig)
    compile_case(case, "bfloat16", "v6e")


@targets
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.id)
def test_products_compile(case, target):
    compile_case(case, "bfloat16", target)


@targets
@pytest.mark.parametrize("case", [*EDGE_CASES, *UNALIGNED], ids=lambda case: case.id)
def test_edge_cases_compile(case, target):
    compile_case(case, "bfloat16", target)


@targets
@pytest.mark.parametrize("case", EDGE_CASES[1:5], ids=lambda case: case.id)
def test_float32_compiles(case, target):
    compile_case(case, "float32", target)


@targets
@pytest.mark.parametrize("tokens", [16, 64])
def test_least_vmem_that_the_chooser_accepts_is_enough(tokens, target):
    """The estimate in config.py, not the size of a real chip, decides what fits: compile right at a small limit."""
    case = QWEN.case(tokens)
    chosen = (choose_decode(sizes_of(case), 4, limit * MIB) for limit in range(2, 48))
    compile_case(case, "float32", target, next(config for config in chosen if config is not None))
