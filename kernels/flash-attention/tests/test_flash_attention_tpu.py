"""Both kernels compiled for real TPUs by libtpu's compiler: compiled, not run."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu")
import jax.numpy as jnp  # noqa: E402
from flash_attention.cases import Case  # noqa: E402
from flash_attention.kernel import attention_backward, attention_forward  # noqa: E402

from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu  # noqa: E402

FEATURES = Case(300, 333, 4, 2, 80, b=2, dv=64, softcap=5.0, sinks=True, slopes=True, bias=(1, 4, 300, 333))
GROUPED = Case(1024, 1024, 8, 1, 128)
HEAD_DIMS = [Case(1024, 1024, 4, 2, d) for d in (64, 96, 192, 256)]

targets = pytest.mark.parametrize("target", TARGETS)


def arguments(case: Case, dtype: str):
    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = array(case.b, case.lq, dtype="int32")
    q, k = array(case.b, case.lq, case.hq, case.d), array(case.b, case.lk, case.hk, case.d)
    v = array(case.b, case.lk, case.hk, case.value_dim)
    bias = array(*case.bias) if case.bias else None
    slopes, sinks = (array(case.hq, dtype="float32") if has else None for has in (case.slopes, case.sinks))
    return q, k, v, rows, rows, bias, slopes, sinks


def compile_forward(case: Case, dtype: str, target: str):
    return compile_for_tpu(
        attention_forward, *arguments(case, dtype), target=target, scale=case.d**-0.5, softcap=case.softcap
    )


def compile_backward(case: Case, dtype: str, target: str):
    out = jax.ShapeDtypeStruct((case.b, case.lq, case.hq, case.value_dim), dtype)
    lse = jax.ShapeDtypeStruct((case.b, case.hq, case.lq), jnp.float32)
    arrays = (*arguments(case, dtype), out, lse, out, lse)
    return compile_for_tpu(attention_backward, *arrays, target=target, scale=case.d**-0.5, softcap=case.softcap)


both = pytest.mark.parametrize("compile_op", [compile_forward, compile_backward])


@targets
@both
def test_all_features_and_unaligned_sizes_compile(compile_op, target):
    compile_op(FEATURES, "bfloat16", target)


@pytest.mark.slow
@targets
@both
def test_grouped_heads_compile(compile_op, target):
    compile_op(GROUPED, "bfloat16", target)


@pytest.mark.slow
@both
@pytest.mark.parametrize("case", HEAD_DIMS, ids=lambda case: case.id)
def test_head_dims_compile(case, compile_op):
    compile_op(case, "bfloat16", "v6e")


@pytest.mark.slow
@targets
@both
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_compile(dtype, compile_op, target):
    compile_op(Case(300, 333, 4, 2, 80), dtype, target)


@both
def test_nothing_as_large_as_rows_times_keys_is_in_memory(compile_op):
    case = Case(8192, 8192, 1, 1, 64)
    assert compile_op(case, "bfloat16", "v6e").memory_analysis().temp_size_in_bytes < case.lq * case.lk
