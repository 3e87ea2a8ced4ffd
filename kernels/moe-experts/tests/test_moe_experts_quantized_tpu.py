"""Quantised weights compiled for real TPUs by libtpu's compiler: compiled and counted, not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu")
import jax.numpy as jnp  # noqa: E402
from moe_experts.cases import GEMMA, GPT_OSS, QUANTIZED_CASES, QWEN, Case  # noqa: E402
from moe_experts.config import MIB, DecodeConfig, PrefillConfig, ProductsConfig, Sizes, choose, choose_decode  # noqa: E402
from moe_experts.kernel import moe_experts_forward  # noqa: E402
from moe_experts.stored import KINDS  # noqa: E402

from pallas_hub.bench.aot.hardware import HARDWARE  # noqa: E402
from pallas_hub.bench.aot.kernels import compile_wishes, own_wish  # noqa: E402
from pallas_hub.bench.aot.programs import Workload  # noqa: E402
from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu  # noqa: E402

DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
FEW = replace(QWEN, experts=16)

# What the reports below don't hold: other formats, numbers of tokens and ways to run.
OTHERS = [
    (FEW.case(5, quantized="int4-g32"), "v6e", DecodeConfig),  # groups' rows start within a register
    (FEW.case(2, quantized="int4-g64"), "tpu7x", DecodeConfig),
    (FEW.case(24, quantized="int4-g64"), "v5e", PrefillConfig),
    (GEMMA.case(16, quantized="fp8-tensor"), "v5p", DecodeConfig),
    (GPT_OSS.case(1, quantized="int4"), "v6e", DecodeConfig),
    (FEW.case(300, quantized="int8"), "v5p", PrefillConfig),
    (FEW.case(300, quantized="int4"), "tpu7x", PrefillConfig),
    (Case(20, 130, 72, 4, 2, transposed=True, quantized="int4-g32"), "v5e", ProductsConfig),
    (Case(3, 96, 64, 4, 2, transposed=True, quantized="fp8-block"), "v6e", ProductsConfig),
]


def sizes_of(case: Case) -> Sizes:
    return Sizes(case.t, case.h, case.w, case.i, case.e, case.top_k, case.transposed, case.stored)


def compile_case(case: Case, dtype: str, target: str, config) -> None:
    array, stored = jax.ShapeDtypeStruct, list(zip(case.stored, case.weight_shapes, strict=True))
    compile_for_tpu(
        moe_experts_forward,
        array((case.t, case.h), dtype),
        *(array((e, kept.data_rows(rows), columns), DTYPES[kept.kind]) for kept, (e, rows, columns) in stored),
        array((case.t, case.top_k), jnp.int32),
        array((case.t, case.top_k), dtype),
        *((array((case.e, case.w), dtype), array((case.e, case.h), dtype)) if case.bias else (None, None)),
        *(array((e, *kept.scale_shape(rows, columns)), jnp.float32) for kept, (e, rows, columns) in stored),
        target=target,
        activation=case.activation,
        gate=case.gate,
        limit=case.limit,
        transposed=True,
        config=config,
    )


@pytest.mark.parametrize(("case", "target", "kind"), OTHERS, ids=lambda part: getattr(part, "id", None))
def test_other_sizes_and_formats_compile(case, target, kind):
    config = choose(sizes_of(case), 2, HARDWARE[target].device_kind)
    assert isinstance(config, kind)
    compile_case(case, "bfloat16", target, config)


@pytest.mark.parametrize(("name", "target"), list(zip(["fp8-block", "int4-g32"] * 2, TARGETS, strict=True)))
def test_least_vmem_that_the_chooser_accepts_is_enough(name, target):
    case = FEW.case(16, quantized=name)
    chosen = (choose_decode(sizes_of(case), 2, limit * MIB) for limit in range(1, 48))
    compile_case(case, "bfloat16", target, next(config for config in chosen if config is not None))


# On TPU7x bfloat16 gets into the matrix units more slowly than int4 comes out of memory.
FITTING = [
    (case, target)
    for case in QUANTIZED_CASES
    for target in ("v5e", "v6e", "tpu7x")
    if case.t in (1, 64) and not (case.quantized == "int4" and target == "tpu7x")
]


def test_bytes_shrink_and_dequantising_fits_under_reading_them():
    """Every seventh case, which meets all formats, sizes and targets in turn."""
    some = FITTING[::7]
    reports = compile_wishes(
        [own_wish("moe-experts", Workload("forward", case.name), target) for case, target in some], around=False
    )
    for (case, target), report in zip(some, reports, strict=True):
        (kernel,) = report.kernels
        assert report.bytes <= 1.01 * report.least_bytes, case.id
        assert kernel.compute_us <= HARDWARE[target].bandwidth_us(kernel.bytes), case.id
