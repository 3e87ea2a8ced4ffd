"""Both kernels compiled for real TPUs by libtpu's compiler: compiled, not run."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu")
import jax.numpy as jnp  # noqa: E402
from ragged_dot.cases import MODELS, Case  # noqa: E402
from ragged_dot.config import MIB, Config, choose_config, choose_weight_gradient_config  # noqa: E402
from ragged_dot.kernel import ragged_dot_forward, ragged_dot_weight_gradient  # noqa: E402

from pallas_hub.bench.aot.runner import Job, run_jobs  # noqa: E402
from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu  # noqa: E402

QWEN = MODELS[0]
DECODE = [case for tokens in (1, 8, 64) for case in QWEN.cases(tokens)]
PREFILL = list(QWEN.cases(4096))
UNALIGNED = [Case(45, 1025, 70, (0, 13, 0, 20, 5)), Case(1, 1, 1, (1,)), Case(300, 130, 257, (100, 0, 150))]
SPLIT_K = Case(45, 1025, 200, (0, 13, 0, 20, 5))
SPLIT_K_BLOCKS = Config(block_m=16, block_k=256, block_n=128)


def shapes(case: Case, dtype: str, *axes: str):
    sizes = {"m": case.m, "k": case.k, "n": case.n, "g": case.g}
    array = jax.ShapeDtypeStruct
    return *(array(tuple(sizes[a] for a in axis), dtype) for axis in axes), array((case.g,), jnp.int32)


def compile_forward(case, dtype, target, transpose=False, config=None):
    arguments = shapes(case, dtype, "mk", "gnk" if transpose else "gkn")
    return compile_for_tpu(ragged_dot_forward, *arguments, target=target, transpose_rhs=transpose, config=config)


def compile_weight_gradient(case, dtype, target, transpose=False, config=None):
    arguments = shapes(case, dtype, "mk", "mn")
    return compile_for_tpu(ragged_dot_weight_gradient, *arguments, target=target, transpose=transpose, config=config)


both = pytest.mark.parametrize("compile_op", [compile_forward, compile_weight_gradient])
targets = pytest.mark.parametrize("target", TARGETS)


@targets
@pytest.mark.parametrize("case", DECODE + PREFILL, ids=lambda case: case.id)
def test_model_sizes_compile(case, target):
    assert compile_forward(case, "bfloat16", target).memory_analysis().output_size_in_bytes == case.m * case.n * 2


@pytest.mark.slow
@targets
@pytest.mark.parametrize("case", [DECODE[0], *PREFILL], ids=lambda case: case.id)
def test_gradients_of_model_sizes_compile(case, target):
    compile_forward(Case(case.m, case.n, case.k, case.group_sizes), "bfloat16", target, transpose=True)
    compiled = compile_weight_gradient(case, "bfloat16", target)
    assert compiled.memory_analysis().output_size_in_bytes == case.g * case.k * case.n * 2


@targets
@both
@pytest.mark.parametrize("transpose", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("case", UNALIGNED, ids=lambda case: case.id)
def test_unaligned_sizes_compile(case, transpose, compile_op, target):
    compile_op(case, "bfloat16", target, transpose)


@targets
@both
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_compile(dtype, compile_op, target):
    compile_op(UNALIGNED[0], dtype, target)


@targets
@pytest.mark.parametrize("transpose", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_split_k_compiles(dtype, transpose, target):
    compile_forward(SPLIT_K, dtype, target, transpose, SPLIT_K_BLOCKS)


@targets
@both
def test_least_vmem_that_the_chooser_accepts_is_enough(compile_op, target):
    """The estimate in config.py, not the size of a real chip, decides what fits: compile right at a small limit."""
    choose = choose_config if compile_op is compile_forward else choose_weight_gradient_config
    config = choose(DECODE[4].m, DECODE[4].k, DECODE[4].n, DECODE[4].g, 4, 8 * MIB)
    compile_op(DECODE[4], "float32", target, config=config)


@pytest.mark.slow
@targets
@both
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", [DECODE[0], PREFILL[0]], ids=lambda case: case.id)
def test_wide_dtypes_of_model_sizes_compile(case, dtype, compile_op, target):
    compile_op(case, dtype, target)


# What the compiler keeps in registers. Larger tiles of v5e, v5p and v6e do spill: see config.py.
WITHOUT_SPILLS = [
    ("forward", "qwen3-30b-a3b-gate-up-t64", "v5e"),
    ("forward", "qwen3-30b-a3b-gate-up-t4096", "tpu7x"),
    ("forward-transposed", "qwen3-30b-a3b-gate-up-t64", "v6e"),
    ("forward-transposed", "qwen3-30b-a3b-down-t4096", "tpu7x"),
    ("backward-lhs", "qwen3-30b-a3b-down-t64", "v6e"),
    ("backward-rhs", "qwen3-30b-a3b-down-t64", "v5e"),
    ("backward-rhs", "qwen3-30b-a3b-down-t4096", "v6e"),
]


@pytest.mark.parametrize(("op", "case", "target"), WITHOUT_SPILLS, ids="-".join)
def test_a_step_has_no_spills(op, case, target, tmp_path):
    program = {"kernel": "ragged-dot", "op": op, "case": case, "impl": "ours", "blocks": None}
    (result,) = run_jobs([Job(target, program, around=False)], workers=1, cache=tmp_path)
    (kernel,) = result["kernels"]
    assert kernel["step"]["matmul"] > 0
    assert (kernel["step"]["spills"], kernel["step"]["fills"]) == (0, 0)
