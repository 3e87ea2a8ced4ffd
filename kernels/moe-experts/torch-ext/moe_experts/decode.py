"""Few tokens: each expert in use reads all of them, and what it makes of tokens it does not serve is dropped.

    out[t] = sum over experts in use of  weight[t, expert] * down[expert] @ gated(gate_up[expert] @ x[t])

A matrix unit takes as long to load a weight tile as to multiply some hundred rows by it, so as long as that is hidden
behind reading the weights, sorting the tokens by expert would gain nothing. Nothing is gathered or scattered: tokens,
sums and the routing stay in VMEM, and weights of experts in use go through it once.

Shapes   x (t, h), gate_up (e, w, h), down (e, h, i), index and weights (t, top_k) -> (t, h); w is 2 * i, or i without a
         gate; transposed weights are (e, h, w) and (e, i, h)
Grid     (experts in use + 1, h / block_h): a step adds a block of h to the first product of one expert, and makes a
         block of the result of the expert before it. With three experts in use and two blocks:

             step          0     1     2     3     4     5     6     7
             gate_up of    0     0     1     1     2     2     -     -
             down of       -     -     0     0     1     1     2     2

Edge     a token that the expert does not serve may make anything of its weights, NaN too: it is dropped, not multiplied
         by zero. So is what the first and the last round compute, which have but one expert
Memory   2 * (a block of gate_up and one of down) + x + out + float32 sums: config.py. Quantised blocks are those of
         quantized_blocks.py, with all the scales of their expert
Limits   bound by reading the weights
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .blocks import for_chunks
from .config import DecodeConfig, Sizes
from .gates import Gating
from .quantized_blocks import blocks_of, spread_scratch
from .routing import experts_in_use


def decode(
    x, gate_up, down, index, weights, biases, scales, *, sizes: Sizes, gating: Gating, config: DecodeConfig, interpret
):
    """As in kernel.py; index int32, of any value, weights float32; biases (e, 1, w) and (e, 1, h), or empty."""
    t, h, w, i = sizes.t, sizes.h, sizes.w, sizes.i
    block_h, transposed = config.block_h, sizes.transposed
    blocks = h // block_h
    table, count = experts_in_use(index, sizes.e)

    def first(v, last):  # the expert of the first product; after the last one its last block stays
        return jnp.minimum(v, last[0])

    def second(v):
        return jnp.maximum(v - 1, 0)

    def gate_up_block(v, j, table, last):
        block = jnp.where(v > last[0], blocks - 1, j)
        return (table[first(v, last)], block, 0) if transposed else (table[first(v, last)], 0, block)

    def down_block(v, j, table, last):
        block = jnp.where(v == 0, 0, j)
        return (table[second(v)], 0, block) if transposed else (table[second(v)], block, 0)

    def whole(array):
        return pl.BlockSpec(array.shape, lambda v, j, table, last: (0, 0))

    bias_blocks = [
        pl.BlockSpec((None, 1, w), lambda v, j, table, last: (table[first(v, last)], 0, 0)),
        pl.BlockSpec((None, 1, block_h), lambda v, j, table, last: (table[second(v)], 0, jnp.where(v == 0, 0, j))),
    ]
    scale_blocks = [
        pl.BlockSpec((None, *scale.shape[1:]), lambda v, j, table, last, of=of: (table[of(v, last)], 0, 0))
        for scale, of in zip(scales, (first, lambda v, last: second(v)), strict=False)
    ]
    data_rows = (sizes.stored[0].data_rows(block_h), sizes.stored[1].data_rows(i)) if scales else (block_h, i)
    body = functools.partial(_visit, blocks=blocks, config=config, gating=gating, sizes=sizes, has_bias=bool(biases))
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(jnp.maximum(count, 1) + 1, blocks),
            in_specs=[
                whole(x),
                whole(index),
                whole(weights),
                pl.BlockSpec((None, data_rows[0], w) if transposed else (None, w, block_h), gate_up_block),
                pl.BlockSpec((None, data_rows[1], block_h) if transposed else (None, block_h, i), down_block),
                *bias_blocks[: len(biases)],
                *scale_blocks,
            ],
            out_specs=whole(x),
            scratch_shapes=[
                pltpu.VMEM((t, w), jnp.float32),
                pltpu.VMEM((t, i), x.dtype),
                pltpu.VMEM((t, h), jnp.float32),
                *spread_scratch(scales, sizes.stored, (w, h)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((t, h), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,  # routing.py keeps every index in bounds
        ),
        interpret=interpret,
        name="moe_experts_decode",
    )(table, jnp.maximum(count, 1).reshape(1) - 1, x, index, weights, gate_up, down, *biases, *scales)


def _visit(
    table_ref, _, x_ref, index_ref, weights_ref, gate_up_ref, down_ref, *refs,
    blocks, config: DecodeConfig, gating: Gating, sizes: Sizes, has_bias,
):  # fmt: skip
    bias_refs, refs = (refs[:2], refs[2:]) if has_bias else ((), refs)
    scale_refs, refs = (refs[:2], refs[2:]) if sizes.stored else ((), refs)
    out_ref, product_ref, gated_ref, sums_ref, *spread_refs = refs
    visit, block = pl.program_id(0), pl.program_id(1)
    block_h, w, chunk = config.block_h, sizes.w, config.chunk
    here = (
        0 if blocks == 1 else pl.multiple_of(block * block_h, block_h)
    )  # one block may have any size, and start at 0 only

    @pl.when((visit == 0) & (block == 0))
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    served = index_ref[...] == table_ref[jnp.maximum(visit - 1, 0)]  # (t, top_k)
    least = jnp.where(visit > 0, 0.5, 2.0)  # in the first round there is no expert before: nobody is served
    serves = jnp.max(served.astype(jnp.float32), axis=1, keepdims=True) > least  # (t, 1)
    weight = jnp.sum(jnp.where(served, weights_ref[...], 0.0), axis=1, keepdims=True)

    gate_up, down = blocks_of(
        (gate_up_ref, down_ref), scale_refs, spread_refs, block == 0, sizes.stored, sizes.transposed
    )

    def add_results(start, size):
        columns = pl.ds(here + start, size)
        y = down.scaled(down.times(gated_ref[...], pl.ds(start, size), 0, columns), columns)
        if has_bias:
            y += bias_refs[1][:, pl.ds(start, size)].astype(jnp.float32)
        sums_ref[:, columns] += jnp.where(serves, weight * y, 0.0)

    def add_product(start, size):
        columns = pl.ds(start, size)
        product = gate_up.times(x_ref[:, pl.ds(here, block_h)], columns, here, columns)
        if blocks > 1:
            product += jnp.where(block == 0, 0.0, product_ref[:, pl.ds(start, size)])
        product_ref[:, pl.ds(start, size)] = product

    for_chunks(block_h, chunk, add_results)
    for_chunks(w, chunk, add_product)

    @pl.when(block == blocks - 1)
    def _():
        def read(columns):
            product = gate_up.scaled(product_ref[:, columns], columns)
            return product + bias_refs[0][:, columns].astype(jnp.float32) if has_bias else product

        def gate(start, size):
            gated_ref[:, pl.ds(start, size)] = gating.columns_of(read, start, size, w).astype(gated_ref.dtype)

        for_chunks(gated_ref.shape[1], gating.chunk(w), gate)

    @pl.when((visit == pl.num_programs(0) - 1) & (block == blocks - 1))
    def _():
        out_ref[...] = sums_ref[...].astype(out_ref.dtype)
