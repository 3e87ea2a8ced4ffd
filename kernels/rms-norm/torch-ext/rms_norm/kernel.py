"""RMS normalisation over the last axis: every grid step takes a block of rows.

    y[i, j] = x[i, j] * rsqrt(mean over j of x[i, j]**2 + eps) * weight[j]

Shapes   x (..., n), weight (n,) -> y (..., n); statistics in float32
Grid     (cdiv(m, block_m),) for x (m, n); rows too wide for VMEM are cut into columns: kernel_wide.py
Edge     a partial last block is safe: rows never mix, and rows past m are not written back
         (the backward pass, which sums over rows, leaves them out)
Memory   config.py: x and y twice (one block computed, one in flight), dweight once in float32
Dtypes   float32 and bfloat16; TPUs load no float16, so XLA widens it to float32 before the kernel and rounds after
Limits   bound by memory traffic: forward reads x once and writes y once; backward reads x and dy once and writes dx
         once, since 1 / rms costs no bytes when it is computed again
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import kernel_wide
from .config import Config, backward_streams, choose, forward_streams, sum_rows
from .tiles import Order, fold_chunks, walk_tiles


def rms_norm_forward(x, weight, *, eps, zero_centered=False, float32_scale=False, config=None, interpret=False):
    """(..., n), (n,) -> (..., n)."""
    order = Order(eps, zero_centered, zero_centered or float32_scale)
    return _forward([x], weight, order, config, interpret)[0]


def rms_norm_residual_forward(
    x, residual, weight, *, eps, zero_centered=False, float32_scale=False, config=None, interpret=False
):
    """(..., n), (..., n), (n,) -> y (..., n), x + residual (..., n)."""
    order = Order(eps, zero_centered, zero_centered or float32_scale)
    return _forward([x, residual], weight, order, config, interpret)


def rms_norm_backward(x, weight, dy, *, eps, zero_centered=False, float32_scale=False, config=None, interpret=False):
    """(..., n), (n,), (..., n) -> dx (..., n), dweight (n,)."""
    order = Order(eps, zero_centered, zero_centered or float32_scale)
    return _backward([x, dy], weight, order, config, interpret)


def rms_norm_residual_backward(
    total, weight, dy, dtotal, *, eps, zero_centered=False, float32_scale=False, config=None, interpret=False
):
    """total = x + residual, and the gradients of y and total -> gradient of x (and of residual), dweight."""
    order = Order(eps, zero_centered, zero_centered or float32_scale)
    return _backward([total, dy, dtotal], weight, order, config, interpret)


def _forward(operands, weight, order: Order, config: Config | None, interpret):
    x = operands[0]
    if jnp.float16 in (x.dtype, weight.dtype):
        return _forward_float16(operands, weight, order, config, interpret)
    m, n = math.prod(x.shape[:-1]), x.shape[-1]
    y_dtype = order.output_dtype(x.dtype, weight.dtype)
    results = [jax.ShapeDtypeStruct((m, n), dtype) for dtype in (y_dtype, x.dtype)[: len(operands)]]
    if x.size == 0:
        return tuple(jnp.zeros(x.shape, result.dtype) for result in results)
    streams = forward_streams(x.dtype.itemsize, jnp.dtype(y_dtype).itemsize, residual=len(operands) == 2)
    config = config or choose(m, n, streams)
    launch = _launch_forward if config.block_n >= n else kernel_wide.launch_forward
    outputs = launch(
        [operand.reshape(m, n) for operand in operands], weight.reshape(1, n), results, order, config, interpret
    )
    return tuple(output.reshape(x.shape) for output in outputs)


def _forward_float16(operands, weight, order: Order, config: Config | None, interpret):
    y_dtype = order.output_dtype(operands[0].dtype, weight.dtype)
    weight = weight.astype(jnp.float32)
    if operands[0].dtype != jnp.float16:
        return _forward(operands, weight, order, config, interpret)
    total = sum(operands[1:], start=operands[0])
    kernel_weight = weight if order.float32_scale else jnp.ones_like(weight)
    y = _forward([total.astype(jnp.float32)], kernel_weight, order, config, interpret)[0].astype(total.dtype)
    if not order.float32_scale:
        y = (y.astype(jnp.float32) * weight).astype(y_dtype)
    return (y, total)[: len(operands)]


def _launch_forward(operands, weight, results, order: Order, config: Config, interpret):
    m, n = operands[0].shape
    block_of_rows = pl.BlockSpec((config.block_m, n), lambda i: (i, 0))
    whole_weight = pl.BlockSpec((1, n), lambda i: (0, 0))
    return pl.pallas_call(
        functools.partial(_normalize_rows, order=order, tile_m=config.tile_m, residual=len(operands) == 2),
        grid=(pl.cdiv(m, config.block_m),),
        in_specs=[whole_weight] + [block_of_rows] * len(operands),
        out_specs=[block_of_rows] * len(results),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        interpret=interpret,
        name="rms_norm_forward",
    )(weight, *operands)


def _normalize_rows(weight_ref, *refs, order: Order, tile_m: int, residual: bool):
    if residual:
        x_ref, residual_ref, y_ref, total_ref = refs
    else:
        x_ref, y_ref = refs
    block_m, n = x_ref.shape

    def load(rows, cols):
        x = x_ref[rows, cols]
        return x + residual_ref[rows, cols] if residual else x

    def squares(rows, cols):
        x = load(rows, cols)
        if residual:
            total_ref[rows, cols] = x
        x = x.astype(jnp.float32)
        return (x * x,)

    def inverse_rms(sum_of_squares):
        return jax.lax.rsqrt(sum_of_squares / n + order.eps)

    def write(rows, cols, scale, valid):
        unit = load(rows, cols).astype(jnp.float32) * scale
        y_ref[rows, cols] = order.apply(unit, weight_ref[:, cols], x_ref.dtype, y_ref.dtype)

    walk_tiles(block_m, tile_m, n, terms=squares, finish=inverse_rms, write=write)


def _backward(operands, weight, order: Order, config: Config | None, interpret):
    x, dy = operands[:2]
    m, n = math.prod(x.shape[:-1]), x.shape[-1]
    if x.size == 0:
        return jnp.zeros(x.shape, x.dtype), jnp.zeros((n,), weight.dtype)
    if jnp.float16 in (x.dtype, weight.dtype, dy.dtype):
        wide = [operand.astype(jnp.float32) for operand in operands]
        dx, dweight = _backward(wide, weight.astype(jnp.float32), order, config, interpret)
        return dx.astype(x.dtype), dweight.astype(weight.dtype)
    streams = backward_streams(x.dtype.itemsize, dy.dtype.itemsize, residual=len(operands) == 3)
    config = config or choose(m, n, streams)
    launch = _launch_backward if config.block_n >= n else kernel_wide.launch_backward
    results = [jax.ShapeDtypeStruct((m, n), x.dtype), jax.ShapeDtypeStruct((1, n), weight.dtype)]
    dx, dweight = launch(
        [operand.reshape(m, n) for operand in operands], weight.reshape(1, n), results, order, config, interpret
    )
    return dx.reshape(x.shape), dweight.reshape(n)


def _launch_backward(operands, weight, results, order: Order, config: Config, interpret):
    m, n = operands[0].shape
    block_of_rows = pl.BlockSpec((config.block_m, n), lambda i: (i, 0))
    whole_weight = pl.BlockSpec((1, n), lambda i: (0, 0))
    return pl.pallas_call(
        functools.partial(_accumulate_gradients, order=order, m=m, tile_m=config.tile_m),
        grid=(pl.cdiv(m, config.block_m),),
        in_specs=[whole_weight] + [block_of_rows] * len(operands),
        out_specs=[block_of_rows, whole_weight],
        out_shape=results,
        scratch_shapes=[pltpu.VMEM((sum_rows(config.tile_m), n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        interpret=interpret,
        name="rms_norm_backward",
    )(weight, *operands)


def _accumulate_gradients(weight_ref, x_ref, dy_ref, *refs, order: Order, m: int, tile_m: int):
    """With r = 1 / rms(x) and g = dy * scale:  dx = r * g - x * r**3 * mean(g * x),  dweight = sum of dy * x * r."""
    *dtotal_ref, dx_ref, dweight_ref, sums_ref = refs
    block_m, n = x_ref.shape
    step = pl.program_id(0)

    @pl.when(step == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    def load(ref, rows, cols):
        return ref[rows, cols].astype(jnp.float32)

    def products(rows, cols):
        x = load(x_ref, rows, cols)
        return x * x, x * (load(dy_ref, rows, cols) * order.scale(weight_ref[:, cols]))

    def factors(squares, along):
        inverse_rms = jax.lax.rsqrt(squares / n + order.eps)
        return inverse_rms, inverse_rms * inverse_rms * inverse_rms * (along / n)

    def write(rows, cols, factors, valid):
        inverse_rms, pull = factors
        x, dy = load(x_ref, rows, cols), load(dy_ref, rows, cols) * inverse_rms
        dx = dy * order.scale(weight_ref[:, cols]) - x * pull
        if dtotal_ref:
            dx += load(dtotal_ref[0], rows, cols)
        dx_ref[rows, cols] = dx.astype(dx_ref.dtype)
        terms = dy * x if valid is None else jnp.where(valid, dy * x, 0.0)
        sums_ref[:, cols] += _add_row_groups(terms, sums_ref.shape[0])

    rows_left = m - step * block_m if m % block_m else None
    walk_tiles(block_m, tile_m, n, terms=products, finish=factors, write=write, rows_left=rows_left)

    @pl.when(step == pl.num_programs(0) - 1)
    def _():
        def write_sum(cols, carry):
            dweight_ref[:, cols] = jnp.sum(sums_ref[:, cols], axis=0, keepdims=True).astype(dweight_ref.dtype)

        fold_chunks(n, write_sum, None)


def _add_row_groups(terms, group: int):
    """(tile_m, columns) -> (group, columns): registers are added to registers, not across sublanes."""
    return sum(terms[start : start + group] for start in range(0, terms.shape[0], group))
