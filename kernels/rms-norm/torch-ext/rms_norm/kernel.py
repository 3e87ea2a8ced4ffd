"""RMS normalisation over the last axis: every grid step takes a block of rows.

    y[i, j] = x[i, j] * rsqrt(mean over j of x[i, j]**2 + eps) * weight[j]

Shapes   x (..., n), weight (n,) -> y (..., n); statistics in float32
Grid     (cdiv(m, block_m),) for x (m, n), backward by cores that sum dweight by themselves; rows too wide for VMEM are
         cut into columns: kernel_wide.py
Edge     a partial last block is safe: rows never mix, and rows past m are not written back
         (the backward pass, which sums over rows, leaves them out)
Memory   config.py: x and y twice (one block computed, one in flight), dweight and weight once in float32
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
from ._bridge.tuning import device_kind
from .config import Config, backward_streams, forward_streams, makes_copies, sum_rows
from .tiles import Order, for_chunks, walk_tiles
from .tuned import tuned_config


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
    residual, kind = len(operands) == 2, device_kind()
    streams = forward_streams(x.dtype.itemsize, jnp.dtype(y_dtype).itemsize, residual=residual)
    config = config or tuned_config("forward", m, n, streams, str(x.dtype), residual=residual, device_kind=kind)
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
        x = load(rows, cols).astype(jnp.float32)
        return (x * x,)

    def inverse_rms(sum_of_squares):
        return (jax.lax.rsqrt(sum_of_squares / n + order.eps),)

    def write(rows, cols, scale):
        x = load(rows, cols)
        if residual:
            total_ref[rows, cols] = x
        y_ref[rows, cols] = order.apply(x.astype(jnp.float32) * scale, weight_ref[:, cols], x_ref.dtype, y_ref.dtype)

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
    residual, kind = len(operands) == 3, device_kind()
    streams = backward_streams(x.dtype.itemsize, dy.dtype.itemsize, residual=residual, device_kind=kind)
    config = config or tuned_config("backward", m, n, streams, str(x.dtype), residual=residual, device_kind=kind)
    results = [jax.ShapeDtypeStruct((m, n), x.dtype), jax.ShapeDtypeStruct((1, n), weight.dtype)]
    args = [operand.reshape(m, n) for operand in operands], weight.reshape(1, n), results, order, config, interpret
    if config.block_n < n:
        dx, dweight = kernel_wide.launch_backward(*args)
    else:
        cores = math.gcd(streams.cores, pl.cdiv(m, config.block_m))
        dx, dweight = _launch_backward(*args, cores=cores, copies=makes_copies(config, m, n, streams))
    return dx.reshape(x.shape), dweight.reshape(n)


def _launch_backward(operands, weight, results, order: Order, config: Config, interpret, *, cores: int, copies: bool):
    """Each core takes its share of the blocks; XLA adds their sums up where there are two."""
    m, n = operands[0].shape
    steps = pl.cdiv(m, config.block_m) // cores
    block_of_rows = pl.BlockSpec((config.block_m, n), lambda core, i: (core * steps + i, 0))
    whole_weight = pl.BlockSpec((1, n), lambda core, i: (0, 0))
    dx, dweight = results
    sums = jax.ShapeDtypeStruct((cores, 1, n), jnp.float32 if cores > 1 else dweight.dtype)
    scratch = [(sum_rows(config.tile_m), n)] * 2 if m > config.tile_m else []  # sums and scale: a register high
    scratch += [(config.block_m, n)] * 2 if copies else []
    dx, sums = pl.pallas_call(
        functools.partial(_accumulate_gradients, order=order, m=m, tile_m=config.tile_m, residual=len(operands) == 3),
        grid=(cores, steps),
        in_specs=[whole_weight] + [block_of_rows] * len(operands),
        out_specs=[block_of_rows, pl.BlockSpec((None, 1, n), lambda core, i: (core, 0, 0))],
        out_shape=[dx, sums],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        interpret=interpret,
        name="rms_norm_backward",
    )(weight, *operands)
    return dx, jnp.sum(sums, axis=0).astype(dweight.dtype) if cores > 1 else sums


def _accumulate_gradients(weight_ref, x_ref, dy_ref, *refs, order: Order, m: int, tile_m: int, residual: bool):
    """With r = 1 / rms(x) and g = dy * scale:  dx = r * g - x * r**3 * mean(g * x),  dweight = sum of dy * x * r."""
    *dtotal_ref, dx_ref, dweight_ref = refs[: 2 + residual]
    alone = m <= tile_m  # a single tile: nothing to add up, and the scale is used once
    sums_ref, scale_ref, *copies = refs[2 + residual :] or (weight_ref, weight_ref)
    block_m, n = x_ref.shape
    step, steps = pl.program_id(1), pl.num_programs(1)
    first_row = (pl.program_id(0) * steps + step) * block_m

    def begin(cols):
        sums_ref[:, cols] = jnp.zeros((sums_ref.shape[0], cols.size), jnp.float32)
        scale_ref[:, cols] = jnp.broadcast_to(order.scale(weight_ref[:, cols]), (scale_ref.shape[0], cols.size))

    def load(ref, rows, cols):
        return ref[rows, cols].astype(jnp.float32)

    def scale(cols):
        if alone:
            return order.scale(weight_ref[:, cols])
        return jnp.concatenate([scale_ref[:, cols]] * (tile_m // scale_ref.shape[0]), axis=0)

    def products(rows, cols):
        x, dy = load(x_ref, rows, cols), load(dy_ref, rows, cols)
        for copy_ref, value in zip(copies, (x, dy), strict=False):
            copy_ref[rows, cols] = value
        return x * x, x * (dy * scale(cols))

    def factors(squares, along):
        inverse_rms = jax.lax.rsqrt(squares / n + order.eps)
        return inverse_rms, inverse_rms * inverse_rms * inverse_rms * (along / n)

    def write(rows, cols, inverse_rms, pull):
        x, dy = (load(ref, rows, cols) for ref in copies or (x_ref, dy_ref))
        dy = dy * inverse_rms
        dx = dy * scale(cols) - x * pull
        if dtotal_ref:
            dx += load(dtotal_ref[0], rows, cols)
        dx_ref[rows, cols] = dx.astype(dx_ref.dtype)
        add(cols, _leave_out_rows(dy * x, first_row + rows.start, m) if m % block_m else dy * x)

    def add(cols, terms):
        if alone:
            write_sum(cols, terms)
        else:
            sums_ref[:, cols] += _add_row_groups(terms, sums_ref.shape[0])

    def write_sum(cols, sums):
        dweight_ref[:, cols] = jnp.sum(sums, axis=0, keepdims=True).astype(dweight_ref.dtype)

    if not alone:
        pl.when(step == 0)(lambda: for_chunks(n, begin))
    walk_tiles(block_m, tile_m, n, terms=products, finish=factors, write=write)
    if not alone:
        last = step == steps - 1
        pl.when(last)(lambda: for_chunks(n, lambda cols: write_sum(cols, sums_ref[:, cols])))


def _leave_out_rows(terms, first, m: int):
    """Zero the rows past m of a tile whose row 0 is row `first` of x: there, blocks hold anything."""
    return jnp.where(first + jax.lax.broadcasted_iota(jnp.int32, terms.shape, 0) < m, terms, 0.0)


def _add_row_groups(terms, group: int):
    """(tile_m, columns) -> (group, columns): registers are added to registers, not across sublanes."""
    return sum(terms[start : start + group] for start in range(0, terms.shape[0], group))
