"""RMS normalisation of rows too wide for VMEM: a block of rows is visited in two sweeps over its columns.

    sweep 0   x comes in column block by column block, is squared into sums, and stays in scratch memory
    sweep 1   y goes out column block by column block, computed from scratch

x is still read from HBM once. While a sweep does not use an operand or a result, its index map stands still, so that
nothing is copied. Columns past n (the last block may be partial) are set to zero before they are summed.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .config import LANES, Config
from .tiles import Order, sum_lanes


def launch_forward(operands, weight, results, order: Order, config: Config, interpret):
    m, n = operands[0].shape
    grid, specs = _cut(m, n, config)
    return pl.pallas_call(
        functools.partial(_normalize_columns, order=order, n=n, residual=len(operands) == 2),
        grid=grid,
        in_specs=[specs.weight_late] + [specs.block_early] * len(operands),
        out_specs=[specs.block_late, specs.block_early][: len(results)],
        out_shape=results,
        scratch_shapes=[
            pltpu.VMEM((grid[2], config.block_m, config.block_n), operands[0].dtype),
            pltpu.VMEM((config.block_m, LANES), jnp.float32),
        ],
        compiler_params=_params(config, "parallel"),
        interpret=interpret,
        name="rms_norm_forward_wide",
    )(weight, *operands)


def _normalize_columns(weight_ref, *refs, order: Order, n: int, residual: bool):
    if residual:
        x_ref, residual_ref, y_ref, total_ref, kept_ref, sums_ref = refs
    else:
        x_ref, y_ref, kept_ref, sums_ref = refs
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when(sweep == 0)
    def _():
        x = x_ref[...] + residual_ref[...] if residual else x_ref[...]
        if residual:
            total_ref[...] = x
        kept_ref[j] = x
        x = _zero_past(x.astype(jnp.float32), j, n)
        _add_to(sums_ref, sum_lanes(x * x), first=j == 0)

    @pl.when(sweep == 1)
    def _():
        squares = jnp.sum(sums_ref[...], axis=1, keepdims=True)
        unit = kept_ref[j].astype(jnp.float32) * jax.lax.rsqrt(squares / n + order.eps)
        y_ref[...] = order.apply(unit, weight_ref[...], kept_ref.dtype, y_ref.dtype)


def launch_backward(operands, weight, results, order: Order, config: Config, interpret):
    m, n = operands[0].shape
    grid, specs = _cut(m, n, config)
    x, dy = operands[:2]
    kept = (grid[2], config.block_m, config.block_n)
    return pl.pallas_call(
        functools.partial(_accumulate_columns, order=order, m=m, n=n),
        grid=grid,
        in_specs=[specs.weight, specs.block_early, specs.block_early] + [specs.block_late] * (len(operands) - 2),
        out_specs=[specs.block_late, specs.weight_last],
        out_shape=results,
        scratch_shapes=[
            pltpu.VMEM(kept, x.dtype),
            pltpu.VMEM(kept, dy.dtype),
            pltpu.VMEM((config.block_m, LANES), jnp.float32),
            pltpu.VMEM((config.block_m, LANES), jnp.float32),
            pltpu.VMEM(kept, jnp.float32),
        ],
        compiler_params=_params(config, "arbitrary"),
        interpret=interpret,
        name="rms_norm_backward_wide",
    )(weight, *operands)


def _accumulate_columns(weight_ref, x_ref, dy_ref, *refs, order: Order, m: int, n: int):
    *dtotal_ref, dx_ref, dweight_ref, kept_x_ref, kept_dy_ref, squares_ref, along_ref, sums_ref = refs
    i, sweep, j = (pl.program_id(axis) for axis in range(3))
    block_m = x_ref.shape[0]

    @pl.when(sweep == 0)
    def _():
        x, dy = x_ref[...], dy_ref[...]
        kept_x_ref[j] = x
        kept_dy_ref[j] = dy
        x = _zero_past(x.astype(jnp.float32), j, n)
        g = dy.astype(jnp.float32) * order.scale(weight_ref[...])
        _add_to(squares_ref, sum_lanes(x * x), first=j == 0)
        _add_to(along_ref, sum_lanes(_zero_past(x * g, j, n)), first=j == 0)

    @pl.when(sweep == 1)
    def _():
        inverse_rms = jax.lax.rsqrt(jnp.sum(squares_ref[...], axis=1, keepdims=True) / n + order.eps)
        pull = inverse_rms**3 * (jnp.sum(along_ref[...], axis=1, keepdims=True) / n)
        x, dy = kept_x_ref[j].astype(jnp.float32), kept_dy_ref[j].astype(jnp.float32)
        dx = dy * order.scale(weight_ref[...]) * inverse_rms - x * pull
        if dtotal_ref:
            dx += dtotal_ref[0][...].astype(jnp.float32)
        dx_ref[...] = dx.astype(dx_ref.dtype)

        terms = dy * (x * inverse_rms)
        if m % block_m:
            row = i * block_m + jax.lax.broadcasted_iota(jnp.int32, terms.shape, 0)
            terms = jnp.where(row < m, terms, 0.0)
        total = jnp.where(i == 0, 0.0, sums_ref[j]) + terms
        sums_ref[j] = total

        @pl.when(i == pl.num_programs(0) - 1)
        def _():
            dweight_ref[...] = jnp.sum(total, axis=0, keepdims=True).astype(dweight_ref.dtype)


class _Specs:
    """Index maps over (row block, sweep, column block); early: moves in sweep 0, late: moves in sweep 1."""

    def __init__(self, block_m: int, block_n: int, row_blocks: int, column_blocks: int):
        last = column_blocks - 1
        self.block_early = pl.BlockSpec((block_m, block_n), lambda i, s, j: (i, jnp.where(s == 0, j, last)))
        self.block_late = pl.BlockSpec((block_m, block_n), lambda i, s, j: (i, jnp.where(s == 1, j, 0)))
        self.weight = pl.BlockSpec((1, block_n), lambda i, s, j: (0, j))
        self.weight_late = pl.BlockSpec((1, block_n), lambda i, s, j: (0, jnp.where(s == 1, j, 0)))
        self.weight_last = pl.BlockSpec(
            (1, block_n), lambda i, s, j: (0, jnp.where((s == 1) & (i == row_blocks - 1), j, 0))
        )


def _cut(m: int, n: int, config: Config):
    row_blocks, column_blocks = pl.cdiv(m, config.block_m), pl.cdiv(n, config.block_n)
    return (row_blocks, 2, column_blocks), _Specs(config.block_m, config.block_n, row_blocks, column_blocks)


def _params(config: Config, rows: Literal["parallel", "arbitrary"]):
    return pltpu.CompilerParams(
        dimension_semantics=(rows, "arbitrary", "arbitrary"), vmem_limit_bytes=config.vmem_limit_bytes
    )


def _zero_past(block, j, n: int):
    """Zero the columns past n; nothing to do when blocks divide n."""
    if n % block.shape[1] == 0:
        return block
    column = j * block.shape[1] + jax.lax.broadcasted_iota(jnp.int32, block.shape, 1)
    return jnp.where(column < n, block, 0.0)


def _add_to(ref, value, *, first) -> None:
    """Accumulate over the steps of a sweep; the first step overwrites, since scratch starts undefined."""
    ref[...] = value + jnp.where(first, 0.0, ref[...])
