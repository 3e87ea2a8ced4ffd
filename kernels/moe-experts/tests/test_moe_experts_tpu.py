"""The kernels compiled for real TPUs by libtpu's compiler: compiled, not run."""

from __future__ import annotations

import time

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu")
import jax.numpy as jnp  # noqa: E402
from moe_experts.cases import DECODE_TOKENS, EDGE_CASES, MODEL_CASES, QWEN, Case  # noqa: E402
from moe_experts.config import MIB, DecodeConfig, PrefillConfig, Sizes, choose, choose_decode  # noqa: E402
from moe_experts.kernel import moe_experts_forward  # noqa: E402

from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu  # noqa: E402

targets = pytest.mark.parametrize("target", TARGETS)


def in_turn(cases):
    """Each case for one target, the targets in turn: what differs between them is memory, not the rules of layout."""
    pairs = [(case, list(TARGETS)[n % len(TARGETS)]) for n, case in enumerate(cases)]
    return pytest.mark.parametrize(("case", "target"), pairs, ids=[f"{case.id}-{target}" for case, target in pairs])


# One block of h that ends within a register, chunks of it and of w that do too.
UNALIGNED = [Case(33, 1000, 700, 3, 2, bias=True), Case(8, 1300, 640, 3, 2, transposed=True, gate="interleaved")]


def sizes_of(case: Case) -> Sizes:
    return Sizes(case.t, case.h, case.w, case.i, case.e, case.top_k, case.transposed)


DECODE = [case for case in MODEL_CASES if isinstance(choose(sizes_of(case), 2), DecodeConfig)]
LARGEST = [case for case in DECODE if case.t == max(DECODE_TOKENS)]  # takes the most VMEM
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
@pytest.mark.parametrize("case", [*LARGEST, QWEN.case(300, experts_here=16)], ids=lambda case: case.id)
def test_model_sizes_compile(case, target):
    compile_case(case, "bfloat16", target)


@in_turn([case for case in DECODE if case not in LARGEST])
def test_fewer_tokens_of_models_compile(case, target):
    compile_case(case, "bfloat16", target)


def test_several_calls_compile():
    """Of few tokens each, since sorting tens of thousands of slots takes ten seconds to compile."""
    case = QWEN.case(900, experts_here=16)
    compile_case(case, "bfloat16", "v6e", PrefillConfig(tokens=300, block_m=160))


def test_the_two_kernels_of_a_split_prefill_compile():
    case = QWEN.case(300, experts_here=16)
    compile_case(case, "bfloat16", "tpu7x", PrefillConfig(tokens=300, block_m=160, split=True))


def test_float32_rows_fit_where_vmem_is_small():
    """The compiler keeps parts of float32 operands in VMEM, which the estimate has to know of."""
    case = Case(1366, 2048, 512, 64, 10)
    chosen = choose(sizes_of(case), 4, "TPU v5")
    assert isinstance(chosen, PrefillConfig)
    assert chosen.tokens < case.t or chosen.split
    compile_case(case, "float32", "v5p")


INTERLEAVED = [
    Case(64, 2048, 3072, 8, 2, gate="interleaved", bias=True),
    Case(300, 2048, 1000, 8, 2, gate="interleaved"),
]


@pytest.mark.parametrize("case", INTERLEAVED, ids=lambda case: case.id)
def test_wide_interleaved_gates_compile_within_seconds(case):
    """Pairs are parted a chunk at a time: all at once take a matrix of 2 * i * i numbers, and minutes."""
    began = time.process_time()
    compile_case(case, "bfloat16", "v6e")
    assert time.process_time() - began < 15


@in_turn(PRODUCTS)
def test_products_compile(case, target):
    compile_case(case, "bfloat16", target)


@in_turn([*EDGE_CASES, *UNALIGNED])
def test_edge_cases_compile(case, target):
    compile_case(case, "bfloat16", target)


@in_turn(EDGE_CASES[1:5])
def test_float32_compiles(case, target):
    compile_case(case, "float32", target)


@targets
@pytest.mark.parametrize("tokens", [16, 64])
def test_least_vmem_that_the_chooser_accepts_is_enough(tokens, target):
    """The estimate in config.py, not the size of a real chip, decides what fits: compile right at a small limit."""
    case = QWEN.case(tokens)
    chosen = (choose_decode(sizes_of(case), 4, limit * MIB) for limit in range(2, 48))
    compile_case(case, "float32", target, next(config for config in chosen if config is not None))
