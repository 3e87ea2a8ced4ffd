"""Ragged dot: rows of `lhs` in contiguous groups, each group times its own matrix of `rhs`.

    out[i] = lhs[i] @ rhs[group of row i]        rows that belong to no group are zero

Shapes   lhs (m, k), rhs (g, k, n) or (g, n, k) when transposed, group_sizes (g,) -> out (m, n)
Dtypes   float32 (multiplied in full precision), bfloat16, float16 (read as bits, see blocks.py); summed in float32
Grid     (cdiv(n, block_n), visits, cdiv(k, block_k)): a visit is one group on one row tile (visits.py); their number
         is known only at run time, and the grid is exactly that long. Groups without rows are never visited
Edge     a tile shared by several groups stays in VMEM while they write to it, first to last: each keeps the rows
         before its own, and what it leaves in the rows past its own is overwritten by the next visit. Rows past the
         last group get visits of their own that write zeros and read nothing.
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

from ._bridge.tuning import device_kind
from .blocks import column_chunks, dot_in_float32, for_kernel, item_bytes, kernel_out_dtype, load
from .config import Config
from .tuned import dtype_name, tuned_config
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
    op = "forward-transposed" if transpose_rhs else "forward"
    config = config or tuned_config(op, m, k, n, g, dtype_name(lhs, rhs), item_bytes(lhs, rhs), device_kind())
    block_m, block_k, block_n = config.block_m, config.block_k, config.block_n
    tiles_k, tiles_n = pl.cdiv(k, block_k), pl.cdiv(n, block_n)
    visits = visits_of_rows(group_sizes, m, block_m)

    def k_tile(p, rows):  # a visit without rows stays on the blocks that are already there
        return p if tiles_k == 1 else jnp.where(row_bounds(rows)[1] > 0, p, tiles_k - 1)

    def lhs_block(j, v, p, group, tile, source, rows):
        return source[v], k_tile(p, rows[v])

    def rhs_block(j, v, p, group, tile, source, rows):
        return (group[v], j, k_tile(p, rows[v])) if transpose_rhs else (group[v], k_tile(p, rows[v]), j)

    def out_block(j, v, p, group, tile, source, rows):
        return tile[v], j

    body = functools.partial(
        _multiply_visit,
        tiles_k=tiles_k,
        k_left=k % block_k,
        rhs_k_axis=1 if transpose_rhs else 0,
        chunk=config.chunk,
    )
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tiles_n, visits.count, tiles_k),
            in_specs=[
                pl.BlockSpec((block_m, block_k), lhs_block),
                pl.BlockSpec((None, block_n, block_k) if transpose_rhs else (None, block_k, block_n), rhs_block),
            ],
            out_specs=pl.BlockSpec((block_m, block_n), out_block),
            scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)] if tiles_k > 1 else [],
        ),
        out_shape=jax.ShapeDtypeStruct((m, n), kernel_out_dtype(lhs.dtype)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,  # visits.py clips every index; the checks cost 50 bundles per step
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n,
            bytes_accessed=tiles_n * lhs.nbytes + min(g, m) * (rhs.nbytes // g) + m * n * lhs.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="ragged_dot_forward",
    )(visits.group, visits.tile, visits.source, visits.rows, for_kernel(lhs), for_kernel(rhs))
    return out.astype(lhs.dtype)


def _multiply_visit(
    _group, _tile, _source, rows_ref, lhs_ref, rhs_ref, out_ref, *acc, tiles_k, k_left, rhs_k_axis, chunk
):
    first_row, past_row = row_bounds(rows_ref[pl.program_id(1)])
    step = pl.program_id(2)

    def multiply():
        for columns in column_chunks(out_ref.shape[1], chunk):
            rhs = rhs_ref.at[columns] if rhs_k_axis == 1 else rhs_ref.at[:, columns]
            product = _multiply_block(lhs_ref, rhs, step, tiles_k, k_left, rhs_k_axis)
            if tiles_k == 1:
                _write_rows(out_ref.at[:, columns], product, first_row)
            else:
                acc_ref = acc[0].at[:, columns]
                _accumulate(acc_ref, product, step)

                @pl.when(step == tiles_k - 1)
                def _(acc_ref=acc_ref, columns=columns):
                    _write_rows(out_ref.at[:, columns], acc_ref[...], first_row)

    jax.lax.cond(past_row > 0, multiply, lambda: _clear_rows(out_ref, first_row))


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


def _write_rows(out_ref, product, first_row):
    """Rows before the group keep what earlier groups wrote. Rows past it belong to visits still to come."""
    row = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
    before = out_ref[...].astype(jnp.float32)  # v5e and v5p cannot select in bfloat16
    out_ref[...] = jnp.where(row < first_row, before, product).astype(out_ref.dtype)


def _clear_rows(out_ref, first_row):
    """Zeros from `first_row` on, a few rows at a time: a short loop instead of a long run of stores."""

    def clear(i, _):
        rows = pl.ds(pl.multiple_of(i * 16, 16), 16)
        row = i * 16 + jax.lax.broadcasted_iota(jnp.int32, (16, out_ref.shape[1]), 0)
        out_ref[rows, :] = jnp.where(row < first_row, out_ref[rows, :], 0)
        return 0

    jax.lax.fori_loop(0, out_ref.shape[0] // 16, clear, 0)
