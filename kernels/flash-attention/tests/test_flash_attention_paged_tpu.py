"""Attention over pages compiled for real TPUs by libtpu's compiler: compiled, not run."""

from __future__ import annotations

import functools

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu")
import jax.numpy as jnp  # noqa: E402
from flash_attention.paged import paged_attention  # noqa: E402
from flash_attention.paged_cases import MODEL_CASES, PagedCase  # noqa: E402

from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu  # noqa: E402

POOL = 1 << 26  # numbers in pages of keys: many times what queries and results take
SMALL = functools.partial(PagedCase, 4, 256)
EDGES = [
    (SMALL(6, 3, 128, 16), "bfloat16", {}),  # heads that fill no tile
    (SMALL(8, 1, 128, 16), "bfloat16", {"softcap": 30.0}),
    (SMALL(8, 4, 80, 32), "bfloat16", {"causal": False}),
    (SMALL(4, 4, 96, 16), "bfloat16", {"window": 40}),
    (SMALL(8, 4, 128, 16), "float32", {"window": 40}),
    (SMALL(4, 2, 192, 8), "float32", {}),
]


def compile_case(case: PagedCase, dtype: str, target: str, queries: int = 1, sinks: bool = False, **rule):
    array = jax.ShapeDtypeStruct
    num_pages = max(case.num_pages, POOL // (case.page * case.hk * case.d))
    pages = array((num_pages, case.page, case.hk, case.d), dtype)
    compiled = compile_for_tpu(
        paged_attention,
        array((case.s * queries, case.hq, case.d), dtype),
        pages,
        pages,
        array((case.s,), jnp.int32),
        array((case.s, case.most_pages), jnp.int32),
        array((case.s + 1,), jnp.int32),
        array((case.hq,), dtype) if sinks else None,
        target=target,
        scale=case.d**-0.5,
        **rule,
    )
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes >= case.s * queries * case.hq * case.d * jnp.dtype(dtype).itemsize
    if case.d == 128 and case.hk % 2 == 0:  # no copy of the pages; elsewhere a TPU keeps them in another order
        assert memory.temp_size_in_bytes * 4 < pages.size * pages.dtype.itemsize
    return compiled


@pytest.mark.parametrize("target", TARGETS)
def test_decode_compiles(target):
    compile_case(next(case for case in MODEL_CASES if case.page == 128), "bfloat16", target)


OTHERS = [(case, list(TARGETS)[n % len(TARGETS)]) for n, case in enumerate(MODEL_CASES) if case.page != 128]


@pytest.mark.parametrize(("case", "target"), OTHERS, ids=[f"{case.name}-{target}" for case, target in OTHERS])
def test_models_compile(case, target):
    compile_case(case, "bfloat16", target, sinks="gpt-oss" in case.name)


@pytest.mark.parametrize("target", ["v5p", "tpu7x"])
def test_prefill_and_decode_in_one_call_compile(target):
    compile_case(PagedCase(16, 1024, 32, 4, 128, 64), "bfloat16", target, queries=8, sinks=True)


TURNS = [(*edge, list(TARGETS)[n % len(TARGETS)]) for n, edge in enumerate(EDGES)]


@pytest.mark.parametrize(("case", "dtype", "rule", "target"), TURNS, ids=str)
def test_edges_compile(case, dtype, rule, target):
    compile_case(case, dtype, target, **rule)


def test_the_longest_tables_that_are_accepted_fit_scalar_memory():
    compile_case(PagedCase(60, 32768, 32, 4, 128, 16), "bfloat16", "v5e")
