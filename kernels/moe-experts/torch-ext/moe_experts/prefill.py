"""Many tokens: rows go to their experts and back inside VMEM, so that no copy of them passes through HBM.

    for each expert in use, for up to block_m of the slots it serves at a time:
        rows = x[token of slot]
        results = down[expert] @ gated(gate_up[expert] @ rows)
        sums[token of slot] += weight of slot * results

All tokens of a call and their sums stay in VMEM, and an expert's weights come in once, while the expert before is
computed. Slots are sorted by expert.

A row that is taken from somewhere has to lie in whole (8, 128) registers of 32-bit words. So rows of x are stacks of
words (t, g, 128), where a word of bfloat16 holds columns c and c + h / 2, and sums are stacks (t, h / 128, 128); a
reshape of some rows makes a matrix of them, or back.

Shapes   x (t, h), gate_up (e, w, h), down (e, h, i), index and weights (t, top_k) -> (t, h); w is 2 * i, or i without a
         gate; transposed weights are (e, h, w) and (e, i, h)
Grid     (visits,), as many as there are at run time: a visit is up to block_m slots of one expert (routing.py)
Edge     rows past the visit's last slot are those of the next expert, or anything; their results go to a row of sums
         past the last token. A token comes to an expert once (kernel.py), so a visit's rows add in any order
Memory   x, sums, 2 * the weights of an expert, and block_m rows in several forms: config.py
Limits   bound by reading the weights up to some thousand tokens, by the matrix units above
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .blocks import dot, for_chunks, weights_of
from .config import LANES, PrefillConfig, Sizes
from .gates import Gating
from .routing import visits_of_experts

ROWS_AT_ONCE = 16  # per round of a loop: enough to hide the way to an address


def prefill(
    x, gate_up, down, index, weights, biases, *, sizes: Sizes, gating: Gating, config: PrefillConfig, interpret
):
    """Arguments as in kernel.py, index int32 and weights float32; biases (e, 1, w) and (e, 1, h), or empty."""
    t, h, i, block_m = sizes.t, sizes.h, sizes.i, config.block_m
    words = _to_words(x)  # (t, g, 128)
    sums = jax.ShapeDtypeStruct((t + 1, h // LANES, LANES), jnp.float32)
    visits = visits_of_experts(index, weights, sizes.e, block_m)

    def of_expert(array):
        return pl.BlockSpec((None, *array.shape[1:]), lambda v, expert, *_: (expert[v], 0, 0))

    def whole(array):  # in one buffer: it never changes
        return pl.BlockSpec(array.shape, lambda v, *_: (0, 0, 0), pipeline_mode=pl.Buffered(1))

    body = functools.partial(
        _visit, gating=gating, transposed=sizes.transposed, has_bias=bool(biases), chunk=config.chunk
    )
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(jnp.maximum(visits.count, 1),),
            in_specs=[whole(words), of_expert(gate_up), of_expert(down), *map(of_expert, biases)],
            out_specs=whole(sums),
            scratch_shapes=[
                pltpu.VMEM((block_m, *words.shape[1:]), words.dtype),
                pltpu.VMEM((block_m, h), x.dtype),
                pltpu.VMEM((block_m, i), x.dtype),
                pltpu.VMEM((block_m, *sums.shape[1:]), jnp.float32),
            ],
        ),
        out_shape=sums,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,  # routing.py keeps every index in bounds
        ),
        interpret=interpret,
        name="moe_experts_prefill",
    )(visits.expert, visits.first, visits.rows, visits.tokens, visits.weights, words, gate_up, down, *biases)
    return out[:t].reshape(t, h).astype(x.dtype)


def _visit(
    _, first_ref, rows_ref, tokens_ref, weights_ref, words_ref, gate_up_ref, down_ref, *refs,
    gating: Gating, transposed, has_bias, chunk,
):  # fmt: skip
    *bias_refs, sums_ref, taken_ref, x_ref, gated_ref, results_ref = refs
    visit, t, w = pl.program_id(0), words_ref.shape[0], gate_up_ref.shape[1 if transposed else 0]
    slot, rows = first_ref[visit], rows_ref[visit]

    @pl.when(visit == 0)
    def _():
        _clear(sums_ref)

    def take(batch, carry):
        for row in _batch(batch):
            taken_ref[row] = words_ref[tokens_ref[slot + row]]
        return carry

    jax.lax.fori_loop(0, taken_ref.shape[0] // ROWS_AT_ONCE, take, 0)
    _write_rows(x_ref, taken_ref)

    def read(columns):
        product = dot(x_ref[...], weights_of(gate_up_ref, columns, transposed), transposed)
        return product + bias_refs[0][:, columns].astype(jnp.float32) if has_bias else product

    def gate(start, size):
        gated_ref[:, pl.ds(start, size)] = gating.columns_of(read, start, size, w).astype(gated_ref.dtype)

    def multiply(start, size):
        columns = pl.ds(start, size)
        y = dot(gated_ref[...], weights_of(down_ref, columns, transposed), transposed)
        if has_bias:
            y += bias_refs[1][:, columns].astype(jnp.float32)
        stack = pl.ds(start // LANES if isinstance(start, int) else jax.lax.div(start, LANES), size // LANES)
        results_ref[:, stack, :] = y.reshape(y.shape[0], size // LANES, LANES)

    for_chunks(gated_ref.shape[1], gating.chunk(w), gate)
    for_chunks(x_ref.shape[1], chunk, multiply)

    def add(batch, carry):
        totals = []
        for row in _batch(batch):
            token = jnp.where(row < rows, tokens_ref[slot + row], t)
            totals.append((token, sums_ref[token] + weights_ref[slot + row] * results_ref[row]))
        for token, total in totals:  # after all are read: the compiler can't know that tokens differ
            sums_ref[token] = total
        return carry

    jax.lax.fori_loop(0, taken_ref.shape[0] // ROWS_AT_ONCE, add, 0)


def _batch(batch):
    return [batch * ROWS_AT_ONCE + n for n in range(ROWS_AT_ONCE)]


def _clear(ref):
    def clear(row, carry):
        ref[row] = jnp.zeros(ref.shape[1:], ref.dtype)
        return carry

    jax.lax.fori_loop(0, ref.shape[0], clear, 0)


def _to_words(x):
    """(t, h) -> (t, g, 128): float32 as it is, with g = h / 128; two of bfloat16 in an int32, with g = h / 256."""
    t, h = x.shape
    if x.dtype == jnp.float32:
        return x.reshape(t, h // LANES, LANES)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    pairs = bits[:, h // 2 :] << 16 | bits[:, : h // 2]
    return jax.lax.bitcast_convert_type(pairs, jnp.int32).reshape(t, h // 2 // LANES, LANES)


def _write_rows(x_ref, taken_ref):
    """The inverse of _to_words, (block_m, g, 128) -> (block_m, h)."""
    words, half = taken_ref[...].reshape(taken_ref.shape[0], -1), x_ref.shape[1] // 2
    if words.dtype == jnp.float32:
        x_ref[...] = words
    else:
        x_ref[:, :half] = pltpu.bitcast(words << 16, jnp.float32).astype(x_ref.dtype)
        x_ref[:, half:] = pltpu.bitcast(words & jnp.int32(-65536), jnp.float32).astype(x_ref.dtype)
