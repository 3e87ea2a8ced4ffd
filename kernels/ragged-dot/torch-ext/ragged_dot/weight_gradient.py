"""Gradient of a ragged dot for its weights: per group, the rows of `lhs` against the rows of `grad`.

    out[e] = lhs[rows of e].T @ grad[rows of e]        exactly zero for a group without rows

Shapes   lhs (m, k), grad (m, n), group_sizes (g,) -> out (g, k, n)
Grid     (cdiv(k, block_k), cdiv(n, block_n), visits): a visit is one group on one row tile (visits.py), and a group
         without rows has one visit that reads nothing new and writes zeros. Each output block is written once
Edge     rows of other groups in the tile, rows past the last group and rows past m are cleared in both factors,
         since what lies there may be NaN and 0 * NaN is NaN
Memory   2 * (lhs, grad and out blocks) + their cleared copies + a float32 accumulator: config.py
Limits   bound by writing out when groups are small, by the matrix units when they are large
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ._bridge.tuning import device_kind
from .blocks import (
    column_chunks,
    dot_in_float32,
    for_kernel,
    item_bytes,
    kernel_out_dtype,
    load,
    loaded_dtype,
)
from .config import LANES, Config
from .tuned import dtype_name, tuned_config
from .visits import row_bounds, visits_of_groups


def ragged_dot_weight_gradient(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    transpose: bool = False,
    *,
    config: Config | None = None,
    interpret=False,
) -> jax.Array:
    """(m, k), (m, n), (g,) -> (g, k, n) in lhs.dtype, or (g, n, k) when transposed. Arguments were checked in op.py."""
    (m, k), n, g = lhs.shape, grad.shape[1], group_sizes.shape[0]
    if 0 in (m, k, n, g):
        return jnp.zeros((g, n, k) if transpose else (g, k, n), lhs.dtype)
    dtype = dtype_name(lhs, grad)
    config = config or tuned_config("weight-gradient", m, k, n, g, dtype, item_bytes(lhs, grad), device_kind())
    block_m, block_k, block_n = config.block_m, config.block_k, config.block_n
    visits = visits_of_groups(group_sizes, m, block_m)

    left, right, out_dtype = for_kernel(lhs), for_kernel(grad), kernel_out_dtype(lhs.dtype)
    if transpose:  # (lhs.T @ grad).T is grad.T @ lhs
        left, right, k, n, block_k, block_n = right, left, n, k, block_n, block_k
    out = pl.pallas_call(
        functools.partial(_add_visit, chunk=config.chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(k, block_k), pl.cdiv(n, block_n), visits.count),
            in_specs=[
                pl.BlockSpec((block_m, block_k), lambda i, j, v, group, source, rows: (source[v], i)),
                pl.BlockSpec((block_m, block_n), lambda i, j, v, group, source, rows: (source[v], j)),
            ],
            out_specs=pl.BlockSpec((None, block_k, block_n), lambda i, j, v, group, source, rows: (group[v], i, j)),
            scratch_shapes=[
                pltpu.VMEM((block_k, block_n), jnp.float32),
                pltpu.VMEM((block_k, block_m), loaded_dtype(left.dtype)),
                pltpu.VMEM((block_m, block_n), loaded_dtype(right.dtype)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((g, k, n), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,  # visits.py clips every index
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * k * n,
            bytes_accessed=left.nbytes * pl.cdiv(n, block_n)
            + right.nbytes * pl.cdiv(k, block_k)
            + g * k * n * out_dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="ragged_dot_weight_gradient",
    )(visits.group, visits.source, visits.rows, left, right)
    return out.astype(lhs.dtype)


def _add_visit(
    group_ref, _source, rows_ref, left_ref, right_ref, out_ref, acc_ref, own_left_ref, own_right_ref, *, chunk
):
    visit, visits = pl.program_id(2), pl.num_programs(2)
    group = group_ref[visit]
    group_before = jnp.where(visit > 0, group_ref[jnp.maximum(visit - 1, 0)], -1)
    group_after = jnp.where(visit < visits - 1, group_ref[jnp.minimum(visit + 1, visits - 1)], -1)
    first_row, past_row = row_bounds(rows_ref[visit])

    # Written to VMEM, and multiplied in another block of code: the compiler then loads a factor when it needs it and
    # has nothing to spill. A group without rows has zeros here.
    for columns in column_chunks(left_ref.shape[1], LANES):
        own_left_ref[columns, :] = _clear_other_rows(load(left_ref.at[:, columns]), first_row, past_row).T
    for columns in column_chunks(right_ref.shape[1], LANES):
        own_right_ref[:, columns] = _clear_other_rows(load(right_ref.at[:, columns]), first_row, past_row)

    def multiply(add: bool):
        for rows in column_chunks(own_left_ref.shape[0], chunk):
            product = dot_in_float32(own_left_ref[rows, :], own_right_ref[...], (1,), (0,))
            acc_ref[rows, :] = acc_ref[rows, :] + product if add else product

    jax.lax.cond(group_before == group, lambda: multiply(add=True), lambda: multiply(add=False))

    @pl.when(group_after != group)
    def _():
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)


def _clear_other_rows(block, first_row, past_row):
    row = jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
    return jnp.where((row >= first_row) & (row < past_row), block, 0)
