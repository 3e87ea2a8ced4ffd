"""The forward kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ._bridge.tuning import device_kind
from .config import LANES, Config, choose_config
from .scores import (
    LOG2_E,
    MATRIX_COLUMNS,
    bias_heads,
    dot,
    finish_scores,
    item_bytes,
    place_of,
    score_operands,
    take_score_refs,
    whole_blocks,
    write_mask,
)
from .visits import FIRST, LAST, MASKED, batch_of, key_block_of, row_block_of, visits_by_rows

CHAINS = 4  # of dependent additions side by side
ONES = 16  # rows of a bfloat16 register
SMALL_MATRIX_UNITS = ("TPU v5 lite", "TPU v5")


def attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    bias: jax.Array | None,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
    scale: float,
    softcap: float,
    diag: jax.Array | None = None,
    *,
    config: Config | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """(b, lq, hq, d), (b, lk, hk, d), (b, lk, hk, dv) -> (b, lq, hq, dv) in q.dtype, lse (b, hq, lq) float32.

    lo, hi     (b, lq) int32: row i sees the keys lo[i] <= j < hi[i] < lk
    bias       (b | 1, hq | 1, lq | 1, lk), added to the scores
    slopes     (hq,) or (b, hq): slope * |diag[i] - j| is taken off the scores
    sinks      (hq,): one more logit per head in the softmax's denominator
    softcap    0: none
    diag       (b, lq) int32: the key that lies on a row's diagonal; None: the last row's is the last key
    """
    (b, lq, hq, d), (_, lk, hk, dv) = q.shape, v.shape
    if 0 in (b, lq, lk, hq, dv):
        return _of_nothing(b, lq, hq, dv, q.dtype, sinks)
    group = hq // hk
    plain = bias is None and slopes is None and not softcap
    config = config or choose_config(lq, lk, group, d, dv, item_bytes(q), bias_heads(bias, group), plain)
    block_q, block_k = config.block_q, config.block_k
    chunk = config.chunk
    chunks = group * (block_q // chunk)
    # Heads beside each other are what the next layer multiplies: (b, lq, hq, dv) without a transposition after it.
    side_by_side = dv % LANES == 0
    visits = visits_by_rows(lo, hi, lk, block_q, block_k)

    dtype = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    in_tanh = scale / softcap if softcap else scale * LOG2_E
    q_heads = (q.astype(jnp.float32) * in_tanh).astype(dtype).transpose(0, 2, 1, 3).reshape(b, hk, group, lq, d)
    k_heads = k.astype(dtype).transpose(0, 2, 1, 3)  # (b, hk, lk, d)
    v_heads = v.astype(dtype).transpose(0, 2, 3, 1)  # (b, hk, dv, lk)
    # Below the values, rows of ones: their product with the probabilities is the softmax's sum. That is cheap where
    # v takes half a matrix unit, and adding them up keeps registers busy. On v5e and v5p it costs 6 % of the bundles.
    ones = 0 if device_kind() in SMALL_MATRIX_UNITS else ONES
    v_heads = jnp.pad(v_heads, ((0, 0), (0, 0), (0, ones), (0, 0)), constant_values=1)

    def rows_at(h, i, rows, keys):
        return batch_of(rows[i]), 0, row_block_of(rows[i])

    row_spec = pl.BlockSpec((None, 1, block_q), rows_at)
    q_spec = pl.BlockSpec(
        (None, None, group, block_q, d), lambda h, i, rows, keys: (batch_of(rows[i]), h, 0, row_block_of(rows[i]), 0)
    )
    k_spec = pl.BlockSpec(
        (None, None, block_k, d), lambda h, i, rows, keys: (batch_of(rows[i]), h, key_block_of(keys[i]), 0)
    )
    v_spec = pl.BlockSpec(
        (None, None, dv + ones, block_k), lambda h, i, rows, keys: (batch_of(rows[i]), h, 0, key_block_of(keys[i]))
    )
    lo, hi = whole_blocks(lo, hi, lk, block_q)
    more, more_specs = score_operands(q, k, bias, slopes, diag, block_q, block_k, row_spec)
    operands = [q_heads, k_heads, v_heads, lo[:, None], hi[:, None], *more]
    specs = [q_spec, k_spec, v_spec, row_spec, row_spec, *more_specs]
    options = {"bias": bias is not None, "slopes": slopes is not None, "sinks": sinks is not None, "dv": dv}
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32).reshape(1, hq) * LOG2_E)
        specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))

    out, lse = pl.pallas_call(
        functools.partial(_visit, options=options, softcap=softcap, chunk=chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(hk, visits.count),
            in_specs=specs,
            out_specs=[
                pl.BlockSpec(
                    (None, block_q, group * dv), lambda h, i, rows, keys: (batch_of(rows[i]), row_block_of(rows[i]), h)
                )
                if side_by_side
                else pl.BlockSpec(
                    (None, None, group, block_q, dv),
                    lambda h, i, rows, keys: (batch_of(rows[i]), h, 0, row_block_of(rows[i]), 0),
                ),
                pl.BlockSpec(
                    (None, None, group, 1, block_q),
                    lambda h, i, rows, keys: (batch_of(rows[i]), h, 0, 0, row_block_of(rows[i])),
                ),
            ],
            scratch_shapes=[
                pltpu.VMEM((chunks, dv + (ones or 8), chunk), jnp.float32),
                pltpu.VMEM((chunks, 1, chunk), jnp.float32),
                *2 * [pltpu.VMEM((block_k, chunk), jnp.float32), pltpu.VMEM((8, chunk), jnp.float32)],
                pltpu.VMEM((block_q // chunk, block_k, chunk), jnp.float32),
                pltpu.VMEM((dv + ones, block_k), dtype),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((b, lq, hq * dv) if side_by_side else (b, hk, group, lq, dv), dtype),
            jax.ShapeDtypeStruct((b, hk, group, 1, lq), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="attention_forward",
    )(visits.rows, visits.keys, *operands)
    out = out.reshape(b, lq, hq, dv) if side_by_side else out.reshape(b, hq, lq, dv).transpose(0, 2, 1, 3)
    out = out.astype(q.dtype)
    return out, lse.reshape(b, hq, lq)


def _of_nothing(b, lq, hq, dv, dtype, sinks):
    lse = jnp.full((b, hq, lq), -jnp.inf, jnp.float32)
    if sinks is not None:
        lse = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], lse.shape)
    return jnp.zeros((b, lq, hq, dv), dtype), lse


def _visit(rows_ref, keys_ref, q_ref, k_ref, v_ref, lo_ref, hi_ref, *refs, options, softcap, chunk):
    refs = list(refs)
    score_refs = take_score_refs(refs, options)
    sinks_ref = refs.pop(0) if options["sinks"] else None
    out_ref, lse_ref, acc_ref, max_ref, s0_ref, peak0_ref, s1_ref, peak1_ref, mask_ref, seen_v_ref = refs
    buffers = (s0_ref, peak0_ref), (s1_ref, peak1_ref)
    group, block_q = q_ref.shape[:2]
    block_k = k_ref.shape[0]
    per_head = block_q // chunk
    chunks, dv = group * per_head, options["dv"]
    # The sum is the row below the values, or what eight rows there add up to.
    sums_by_product, rows_of_sum = v_ref.shape[0] > dv, acc_ref.shape[1] - dv
    first_share = 1.0 if sums_by_product else 1 / rows_of_sum
    head, step = pl.program_id(0), pl.program_id(1)
    flags = keys_ref[step]
    batch, first_key = batch_of(rows_ref[step]), key_block_of(flags) * block_k

    place = functools.partial(place_of, per_head=per_head, chunk=chunk)

    @pl.when(flags & FIRST != 0)
    def _():
        def clear(n, _):
            acc_ref[n] = jnp.zeros(acc_ref.shape[1:], jnp.float32)
            if sinks_ref is None:
                max_ref[n] = jnp.full((1, chunk), -jnp.inf, jnp.float32)
            else:
                max_ref[n] = jnp.full((1, chunk), sinks_ref[0, head * group + place(n)[0]], jnp.float32)
                acc_ref[n, dv:] = jnp.full((rows_of_sum, chunk), first_share, jnp.float32)
            return 0

        jax.lax.fori_loop(0, chunks, clear, 0)

    def keep_scores(n, s, masked, buffer):
        s_ref, peak_ref = buffer
        mask = mask_ref.at[0 if per_head == 1 else n % per_head] if masked else None
        s, _ = finish_scores(s, place(n), score_refs, softcap, head * group, batch, first_key, mask)
        s_ref[...] = s
        peak_ref[...] = _fold(jnp.maximum, s)

    def softmax_and_product(n, v_ref, buffer):
        s_ref, peak_ref = buffer
        old_max = max_ref[n]
        new_max = jnp.maximum(old_max, jnp.max(peak_ref[...], axis=0, keepdims=True))
        shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        keep = jnp.exp2(old_max - shift)
        max_ref[n] = new_max
        for columns in _slices(chunk):
            acc = acc_ref.at[n, :, columns]
            acc[...] *= keep[:, columns]  # stored before the product comes, or it would fill the registers until then
            for keys in _slices(block_k):  # one matrix unit's height: its products are added to memory at once
                p = jnp.exp2(s_ref[keys, columns] - shift[:, columns])
                acc[: v_ref.shape[0]] += dot(v_ref[:, keys], p.astype(v_ref.dtype), ((1,), (0,)))
                if not sums_by_product:
                    acc[dv:] += _fold(jnp.add, p)

    def multiply(masked):
        if masked:
            write_mask(mask_ref, lo_ref, hi_ref, first_key)
            _keep_seen_keys(seen_v_ref, v_ref, jnp.min(lo_ref[...]) - first_key, jnp.max(hi_ref[...]) - first_key)

        def multiply_chunk(n):
            g, rows = place(n)
            return dot(k_ref[...], q_ref[g, rows, :], ((1,), (1,)))  # (block_k, chunk)

        def two_chunks(i, _):
            """The softmax of a chunk beside the scores of the next, so that neither waits."""
            for here, there in ((0, 1), (1, 0)):
                n = 2 * i + here
                after = jnp.minimum(n + 1, chunks - 1)
                s = multiply_chunk(after)
                softmax_and_product(n, seen_v_ref if masked else v_ref, buffers[here])
                keep_scores(after, s, masked, buffers[there])
            return 0

        keep_scores(0, multiply_chunk(0), masked, buffers[0])
        jax.lax.fori_loop(0, chunks // 2, two_chunks, 0)
        if chunks % 2:
            softmax_and_product(chunks - 1, seen_v_ref if masked else v_ref, buffers[0])

    jax.lax.cond(flags & MASKED != 0, lambda: multiply(True), lambda: multiply(False))

    @pl.when(flags & LAST != 0)
    def _():
        def write(n, _):
            g, rows = place(n)
            total = acc_ref[n, dv:, :]
            total = total[:1] if sums_by_product else jnp.sum(total, axis=0, keepdims=True)
            out = acc_ref[n, :dv, :] * jnp.where(total == 0, 0.0, 1 / total)
            out = out.T.astype(out_ref.dtype)
            if len(out_ref.shape) == 2:
                out_ref[rows, pl.ds(pl.multiple_of(g * dv, LANES), dv)] = out
            else:
                out_ref[g, rows, :] = out
            lse_ref[g, :, rows] = jnp.where(total == 0, -jnp.inf, max_ref[n] / LOG2_E + jnp.log(total))
            return 0

        jax.lax.fori_loop(0, chunks, write, 0)


def _slices(size):
    return [slice(start, min(start + MATRIX_COLUMNS, size)) for start in range(0, size, MATRIX_COLUMNS)]


def _fold(combine, x):
    """(rows, columns) -> (8, columns), in a few chains side by side: in a chain each step waits for the one before."""
    chains = [x[i : i + 8] for i in range(0, 8 * CHAINS, 8)]
    for i in range(CHAINS, x.shape[0] // 8):
        chains[i % CHAINS] = combine(chains[i % CHAINS], x[8 * i : 8 * i + 8])
    return functools.reduce(combine, chains)


def _keep_seen_keys(to_ref, v_ref, first, past):
    """Zeros for the keys that no row of the block sees: there may be anything there, and 0 * NaN is NaN."""
    key = jax.lax.broadcasted_iota(jnp.int32, v_ref.shape, 1)
    v = v_ref[...].astype(jnp.float32)  # v5e and v5p cannot select in bfloat16
    to_ref[...] = jnp.where((key >= first) & (key < past), v, 0).astype(to_ref.dtype)
