"""Two cores of a v5p: steps are shared where the compiled code says so, and only there."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
pytest.importorskip("libtpu", reason="skipped: needs libtpu, the TPU compiler")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_hub.bench.aot import compile_report
from pallas_hub.bench.aot.report import _share_steps


def double(x, *, rows, axes, inner=1):
    """A grid of blocks of rows, walked `inner` times each."""
    grid = (pl.cdiv(x.shape[0], rows),) + (inner,) * (len(axes) - 1)

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2.0

    block = pl.BlockSpec((rows, x.shape[1]), lambda i, *inner: (i, 0))
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=axes),
        name="double",
    )(x)


def report(steps, target, axes=("parallel",), inner=1):
    x = jax.ShapeDtypeStruct((64 * steps, 1024), jnp.float32)
    (kernel,) = compile_report(double, [x], target=target, rows=64, axes=axes, inner=inner).kernels
    return kernel


@pytest.mark.parametrize(("steps", "of_one_core"), [(8, 4), (7, 4), (2, 1)])
def test_v5p_shares_a_parallel_axis(steps, of_one_core):
    kernel = report(steps, "v5p")
    assert (kernel.steps, kernel.cores, kernel.core_steps) == (steps, 2, of_one_core)
    hardware = 1.75e3  # cycles per us
    assert kernel.compute_us == pytest.approx(of_one_core * kernel.step_bundles / hardware)
    if of_one_core == 1:  # in, compute, out
        assert kernel.time_us == pytest.approx(kernel.bytes / 2765e3 + kernel.compute_us)
    else:  # each core waits for its first block and its last one
        assert kernel.time_us == pytest.approx((kernel.bytes + 2 * kernel.fill_bytes) / 2765e3)


def test_v5p_shares_the_parallel_axis_of_two():
    kernel = report(5, "v5p", ("parallel", "arbitrary"), inner=3)
    assert (kernel.steps, kernel.cores, kernel.core_steps) == (15, 2, 9)


@pytest.mark.parametrize(
    ("target", "axis", "steps"), [("v5p", "arbitrary", 8), ("v5p", "parallel", 1), ("v6e", "parallel", 8)]
)
def test_elsewhere_one_core_takes_all_steps(target, axis, steps):
    kernel = report(steps, target, (axis,))
    assert (kernel.steps, kernel.cores, kernel.core_steps) == (steps, 1, steps)


@pytest.mark.parametrize("core_steps", [None, 3, 8, 9])
def test_a_loop_that_does_not_fit_the_steps_proves_nothing(core_steps):
    assert _share_steps({"cores": 2, "core_steps": core_steps}, 8) == (1, 8)


def test_unknown_steps_stay_unknown():
    assert _share_steps({"cores": 2, "core_steps": 4}, None) == (1, None)


def test_no_time_is_shorter_than_the_matrix_units_take():
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    free, bound = (compile_report(double, [x], target="v6e", rows=64, axes=("parallel",), flops=n) for n in (0, 10**12))
    assert free.kernel_us == pytest.approx(free.kernels[0].time_us)
    assert bound.kernel_us == pytest.approx(1e12 / 918e12 * 1e6)  # operations at the published peak
