"""Ragged dot: rows of `lhs` in contiguous groups, each group times its own matrix of `rhs`.

    out[i] = lhs[i] @ rhs[group of row i]        rows that belong to no group are zero

Shapes   lhs (m, k), rhs (g, k, n) or (g, n, k) when transposed, group_sizes (g,) -> out (m, n)
Grid     (cdiv(n, block_n), visits, cdiv(k, block_k)): a visit is one group on one row tile (visits.py); their number
         is known only at run time, and the grid is exactly that long. Groups without rows are never visited
Edge     a tile shared by several groups stays in VMEM while they fill in their rows, first to last; rows past a
         group are written as zero and overwritten by the next one, so that what is left at the end is zero.
         Rows never mix, so whatever lies past m or past the last group in lhs (NaN too) reaches no result
Memory   2 * (lhs, rhs and out blocks) + a float32 product (+ a float32 accumulator when k is split): config.py
Limits   decode is bound by reading each active group's weights, once when block_k is k; prefill by the matrix units
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .blocks import dot_in_float32, for_kernel, item_bytes, kernel_out_dtype, load
from .config import Config, choose_config
from .visits import row_bounds, visits_of_rows
from .weight_gradient import ragged_dot_weight_gradient

__all__ = ["ragged_dot_forward", "ragged_dot_weight_gradient"]


def ragged_dot_forward(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    transpose_rhs: bool = False,
    *,
    config: Config | None = None,
    interpret=False,
) -> jax.Array:
    """(m, k), (g, k, n) or (g, n, k), (g,) -> (m, n) in lhs.dtype. Arguments were checked in op.py."""
    (m, k), g = lhs.shape, rhs.shape[0]
    n = rhs.shape[1 if transpose_rhs else 2]
    if 0 in (m, k, n, g):
        return jnp.zeros((m, n), lhs.dtype)
    config = config or choose_config(m, k, n, g, item_bytes(lhs, rhs))
    block_m, block_k, block_n = config.block_m, config.block_k, config.block_n
    tiles_k, tiles_n = pl.cdiv(k, block_k), pl.cdiv(n, block_n)
    visits = visits_of_rows(group_sizes, m, block_m)

    if transpose_rhs:
        rhs_block = pl.BlockSpec((None, block_n, block_k), lambda j, v, p, group, tile, rows: (group[v], j, p))
    else:
        rhs_block = pl.BlockSpec((None, block_k, block_n), lambda j, v, p, group, tile, rows: (group[v], p, j))
    body = functools.partial(
        _multiply_visit, tiles_k=tiles_k, k_left=k % block_k, rhs_k_axis=1 if transpose_rhs else 0
    )
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tiles_n, visits.count, tiles_k),
            in_specs=[pl.BlockSpec((block_m, block_k), lambda j, v, p, group, tile, rows: (tile[v], p)), rhs_block],
            out_specs=pl.BlockSpec((block_m, block_n), lambda j, v, p, group, tile, rows: (tile[v], j)),
            scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)] if tiles_k > 1 else [],
        ),
        out_shape=jax.ShapeDtypeStruct((m, n), kernel_out_dtype(lhs.dtype)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n,
            bytes_accessed=tiles_n * lhs.nbytes + min(g, m) * (rhs.nbytes // g) + m * n * lhs.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="ragged_dot_forward",
    )(visits.group, visits.tile, visits.rows, for_kernel(lhs), for_kernel(rhs))
    return out.astype(lhs.dtype)


def _multiply_visit(_group, _tile, rows_ref, lhs_ref, rhs_ref, out_ref, *acc, tiles_k, k_left, rhs_k_axis):
    first_row, past_row = row_bounds(rows_ref[pl.program_id(1)])
    step = pl.program_id(2)

    @pl.when(past_row > 0)
    def _():
        product = _multiply_block(lhs_ref, rhs_ref, step, tiles_k, k_left, rhs_k_axis)
        if tiles_k == 1:
            _write_rows(out_ref, product, first_row, past_row)
        else:
            _accumulate(acc[0], product, step)

            @pl.when(step == tiles_k - 1)
            def _():
                _write_rows(out_ref, acc[0][...], first_row, past_row)

    @pl.when(past_row == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)


def _multiply_block(lhs_ref, rhs_ref, step, tiles_k, k_left, rhs_k_axis):
    lhs, rhs = load(lhs_ref), load(rhs_ref)  # (block_m, block_k), (block_k, block_n) or transposed
    if k_left:  # past k both blocks hold anything, and 0 * NaN is NaN: clear both
        k_here = jnp.where(step == tiles_k - 1, k_left, lhs.shape[1])
        lhs = jnp.where(jax.lax.broadcasted_iota(jnp.int32, lhs.shape, 1) < k_here, lhs, 0)
        rhs = jnp.where(jax.lax.broadcasted_iota(jnp.int32, rhs.shape, rhs_k_axis) < k_here, rhs, 0)
    return dot_in_float32(lhs, rhs, (1,), (rhs_k_axis,))


def _accumulate(acc_ref, product, step):
    @pl.when(step == 0)
    def _():
        acc_ref[...] = product

    @pl.when(step > 0)
    def _():
        acc_ref[...] += product


def _write_rows(out_ref, product, first_row, past_row):
    """Rows before the group keep what earlier groups wrote, rows past it become zero."""
    row = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
    product = jnp.where(row < past_row, product, 0).astype(out_ref.dtype)
    out_ref[...] = jnp.where(row < first_row, out_ref[...], product)
