"""What the compiler says of rms-norm: nothing is spilled, x is copied once, and the code fits under its copies."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
pytest.importorskip("libtpu", reason="skipped: needs libtpu, the TPU compiler")

from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.kernels import compile_wishes, own_wish
from pallas_hub.bench.aot.programs import Workload


def reports(target, *names):
    """Forward and backward of these cases."""
    wishes = [own_wish("rms-norm", Workload(op, name), target) for name in names for op in ("forward", "backward")]
    return compile_wishes(wishes, around=False)


@pytest.mark.parametrize("target", HARDWARE)
def test_4096_by_4096(target):
    for report in reports(target, "llama-3-8b-4096", "llama-3-8b-4096-residual"):
        (kernel,) = report.kernels
        assert (kernel.spills, kernel.fills) == (0, 0), report.label
        assert report.bytes <= report.least_bytes * 1.001, report.label
        if "forward" in report.label or target != "tpu7x":  # there, the vector units are slower than the memory
            assert kernel.compute_us < HARDWARE[target].bandwidth_us(report.bytes), report.label


@pytest.mark.parametrize("target", HARDWARE)
def test_few_rows_other_widths_and_orders_do_not_spill_either(target):
    for report in reports(target, "qwen3-30b-a3b-8", "qwen3-30b-a3b-4096", "gemma-3-27b-64-residual"):
        assert report.spills == 0, report.label
