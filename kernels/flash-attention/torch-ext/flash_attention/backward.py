"""The backward kernel: gradients of q, k and v in one pass over the visits, which recomputes the scores.

    p  = exp(s - lse)              dv += p . dout
    ds = p * (dout . v - delta)    dk += ds . q         dq += k . ds          delta = dout . out - dlse

Grid     (hk, visits): the visits of a block of keys in turn, so dk and dv of that block stay in VMEM meanwhile. dq of
         all rows of a span stays there too, and a block of rows is written when its last block of keys is done
Spans    rows are cut into spans whose dq fits VMEM; each leaves its own float32 part of dk and dv, summed outside.
         Nothing is added in an order that could change: the result is deterministic
Edge     everything is padded with zeros to whole blocks: a row past the last must not reach dk, nor a key dq
Bias     its gradient is ds, which then is written as a whole and summed over the axes that the bias lacks
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .config import LANES, Config, choose_backward_config, rows_per_span
from .scores import (
    LOG2_E,
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
from .visits import (
    FIRST,
    FIRST_OF_ROWS,
    LAST,
    LAST_OF_ROWS,
    MASKED,
    batch_of,
    key_block_of,
    row_block_of,
    visits_by_keys,
)


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    bias: jax.Array | None,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    scale: float,
    softcap: float,
    diag: jax.Array | None = None,
    *,
    needs_bias: bool = True,
    config: Config | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """dq, dk, dv, dbias (None without a bias or need), dsinks (None without sinks), each as what it is the gradient of.

    The arguments are those of attention_forward, its results and their gradients; dlse may be None.
    """
    (b, lq, hq, d), (_, lk, hk, dv) = q.shape, v.shape
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).transpose(0, 2, 1)  # (b, hq, lq)
    if dlse is not None:
        delta = delta - dlse
    lse = jnp.where(jnp.isneginf(lse), 0, lse)  # of a row that sees nothing: its scores are all -inf
    dsinks = None
    if sinks is not None:
        dsinks = -jnp.sum(jnp.exp(sinks.astype(jnp.float32)[:, None] - lse) * delta, axis=(0, 2)).astype(sinks.dtype)
    with_bias = bias is not None and needs_bias
    if 0 in (b, lq, lk, hq, d, dv):
        dbias = jnp.zeros_like(bias) if with_bias else None
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v), dbias, dsinks

    group = hq // hk
    plain = bias is None and slopes is None and not softcap
    config = config or choose_backward_config(lq, lk, group, d, dv, item_bytes(q), bias_heads(bias, group), plain)
    block_q, block_k, chunk = config.block_q, config.block_k, config.chunk
    chunks = group * (block_q // chunk)
    blocks_q, blocks_k = pl.cdiv(lq, block_q), pl.cdiv(lk, block_k)
    span = min(blocks_q, max(1, rows_per_span(group, d) // block_q))  # blocks of rows
    spans = pl.cdiv(blocks_q, span)
    lo, hi = whole_blocks(lo, hi, lk, block_q)
    visits = visits_by_keys(lo, hi, lk, block_q, block_k, span)

    dtype = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    in_tanh = scale / softcap if softcap else scale * LOG2_E
    pad_q, pad_k = (0, -lq % block_q), (0, -lk % block_k)

    def rows_of_heads(x):  # (b, lq, hq, n) -> (b, hk, group, n, rows)
        x = x.astype(dtype).transpose(0, 2, 3, 1).reshape(b, hk, group, x.shape[3], lq)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 0), pad_q))

    def statistic(x):  # (b, hq, lq) -> (b, hk, group, 1, rows)
        return jnp.pad(x, ((0, 0), (0, 0), pad_q)).reshape(b, hk, group, 1, -1)

    def keys_of_heads(x):  # (b, lk, hk, n) -> (b, hk, keys, n)
        return jnp.pad(x.astype(dtype).transpose(0, 2, 1, 3), ((0, 0), (0, 0), pad_k, (0, 0)))

    k_heads = keys_of_heads(k)
    operands = [
        rows_of_heads(q.astype(jnp.float32) * in_tanh),
        rows_of_heads(dout),
        statistic(lse * LOG2_E),
        statistic(delta),
        k_heads,
        k_heads.swapaxes(2, 3),
        keys_of_heads(v),
        lo[:, None],
        hi[:, None],
    ]

    def of_rows(n):
        return pl.BlockSpec(
            (None, None, group, n, block_q),
            lambda h, i, rows, keys, out: (batch_of(rows[i]), h, 0, 0, row_block_of(rows[i])),
        )

    of_statistic = pl.BlockSpec(
        (None, None, group, 1, block_q),
        lambda h, i, rows, keys, out: (batch_of(rows[i]), h, 0, 0, row_block_of(rows[i])),
    )

    def of_keys(n):
        return pl.BlockSpec(
            (None, None, block_k, n), lambda h, i, rows, keys, out: (batch_of(rows[i]), h, key_block_of(keys[i]), 0)
        )

    row_spec = pl.BlockSpec(
        (None, 1, block_q), lambda h, i, rows, keys, out: (batch_of(rows[i]), 0, row_block_of(rows[i]))
    )
    specs = [
        of_rows(d),
        of_rows(dv),
        of_statistic,
        of_statistic,
        of_keys(d),
        pl.BlockSpec(
            (None, None, d, block_k), lambda h, i, rows, keys, out: (batch_of(rows[i]), h, 0, key_block_of(keys[i]))
        ),
        of_keys(dv),
        row_spec,
        row_spec,
    ]
    more, more_specs = score_operands(q, k, bias, slopes, diag, block_q, block_k, row_spec)

    def part_of_keys(n):  # one part of dk or dv per span
        return pl.BlockSpec(
            (None, None, None, block_k, n),
            lambda h, i, rows, keys, out: (batch_of(out[i]), batch_of(rows[i]), h, key_block_of(keys[i]), 0),
        )

    part = dtype if spans == 1 else jnp.float32
    rows, keys = blocks_q * block_q, blocks_k * block_k
    side_by_side = d % LANES == 0  # heads beside each other, as in forward.py
    out_specs = [
        pl.BlockSpec(
            (None, block_q, group * d), lambda h, i, rows, keys, out: (batch_of(rows[i]), row_block_of(out[i]), h)
        )
        if side_by_side
        else pl.BlockSpec(
            (None, None, group, block_q, d),
            lambda h, i, rows, keys, out: (batch_of(rows[i]), h, 0, row_block_of(out[i]), 0),
        ),
        part_of_keys(d),
        part_of_keys(dv),
    ]
    out_shape = [
        jax.ShapeDtypeStruct((b, rows, hq * d) if side_by_side else (b, hk, group, rows, d), dtype),
        jax.ShapeDtypeStruct((spans, b, hk, keys, d), part),
        jax.ShapeDtypeStruct((spans, b, hk, keys, dv), part),
    ]
    if with_bias:
        out_specs.append(
            pl.BlockSpec(
                (None, None, group, block_k, block_q),
                lambda h, i, rows, keys, out: (batch_of(rows[i]), h, 0, key_block_of(keys[i]), row_block_of(rows[i])),
            )
        )
        out_shape.append(jax.ShapeDtypeStruct((b, hk, group, keys, rows), jnp.float32))

    dq, dk, dv_, *ds = pl.pallas_call(
        functools.partial(
            _visit,
            options={"bias": bias is not None, "slopes": slopes is not None, "dbias": with_bias},
            softcap=softcap,
            scale=scale,
            scale_of_dk=scale / in_tanh,
            span=span,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(hk, visits.count),
            in_specs=specs + more_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((span * chunks, d, chunk), jnp.float32),
                pltpu.VMEM((d, block_k), jnp.float32),
                pltpu.VMEM((dv, block_k), jnp.float32),
                *4 * [pltpu.VMEM((block_k, chunk), jnp.float32)],
                pltpu.VMEM((block_q // chunk, block_k, chunk), jnp.float32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="attention_backward",
    )(visits.rows, visits.keys, visits.out, *operands, *more)

    sees = (lo < hi)[:, :lq]
    if side_by_side:
        dq = dq[:, :lq].reshape(q.shape)
    else:
        dq = dq[:, :, :, :lq].reshape(b, hq, lq, d).transpose(0, 2, 1, 3)
    dq = jnp.where(sees[:, :, None, None], dq, 0).astype(q.dtype)  # blocks of rows that see nothing are never visited
    dk, dv_ = (
        (x[0] if spans == 1 else jnp.sum(x, axis=0))[:, :, :lk].transpose(0, 2, 1, 3).astype(like.dtype)
        for x, like in ((dk, k), (dv_, v))
    )
    return dq, dk, dv_, _sum_to_bias(ds[0], bias, lo, hi) if with_bias else None, dsinks


def _sum_to_bias(ds, bias, lo, hi):
    """(b, hk, group, keys, rows) -> as the bias. Pairs that no visit wrote hold anything: they are not seen."""
    (lq, lk), (b, hk, group, _, rows) = bias.shape[2:], ds.shape
    key = jnp.arange(ds.shape[3])[None, :, None]
    seen = (key >= lo[:, None]) & (key < hi[:, None])  # (b, keys, rows)
    ds = jnp.where(seen[:, None, None], ds, 0).reshape(b, hk * group, -1, rows)[:, :, :lk].swapaxes(2, 3)
    axes = tuple(i for i, size in enumerate(bias.shape[:3]) if size == 1)
    ds = jnp.sum(ds, axis=axes, keepdims=True)
    return ds[:, :, :lq].astype(bias.dtype)


def _visit(rows_ref, keys_ref, out_at_ref, *refs, options, softcap, scale, scale_of_dk, span):
    refs = list(refs)
    q_ref, dout_ref, lse_ref, delta_ref, k_ref, kt_ref, v_ref, lo_ref, hi_ref = (refs.pop(0) for _ in range(9))
    score_refs = take_score_refs(refs, options)
    dq_ref, dk_ref, dv_ref = (refs.pop(0) for _ in range(3))
    ds_ref = refs.pop(0) if options["dbias"] else None
    dq_sum_ref, dk_sum_ref, dv_sum_ref, *buffers, mask_ref = refs
    buffers = (buffers[:2], buffers[2:])
    group, _, block_q = q_ref.shape
    block_k, chunk = mask_ref.shape[1:]
    per_head = block_q // chunk
    chunks = group * per_head
    head, step = pl.program_id(0), pl.program_id(1)
    flags = keys_ref[step]
    batch, first_key = batch_of(rows_ref[step]), key_block_of(flags) * block_k
    first_chunk = row_block_of(rows_ref[step]) % span * chunks
    place = functools.partial(place_of, per_head=per_head, chunk=chunk)

    @pl.when(flags & FIRST != 0)
    def _():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    @pl.when(flags & FIRST_OF_ROWS != 0)
    def _():
        def clear(n, _):
            dq_sum_ref[first_chunk + n] = jnp.zeros(dq_sum_ref.shape[1:], jnp.float32)
            return 0

        jax.lax.fori_loop(0, chunks, clear, 0)

    def multiply(masked):
        if masked:
            write_mask(mask_ref, lo_ref, hi_ref, first_key)

        def products(n):
            g, rows = place(n)
            s = dot(k_ref[...], q_ref[g, :, rows], ((1,), (0,)))  # (block_k, chunk)
            return s, dot(v_ref[...], dout_ref[g, :, rows], ((1,), (0,)))

        def keep(n, s, dp, buffer):
            mask = mask_ref.at[0 if per_head == 1 else n % per_head] if masked else None
            s, slope_of_cap = finish_scores(s, place(n), score_refs, softcap, head * group, batch, first_key, mask)
            buffer[0][...] = s
            g, rows = place(n)
            dp = dp - delta_ref[g, :, rows]
            buffer[1][...] = dp if slope_of_cap is None else dp * slope_of_cap

        def gradients(n, buffer):
            g, rows = place(n)
            p = jnp.exp2(buffer[0][...] - lse_ref[g, :, rows])
            ds = p * buffer[1][...]
            if ds_ref is not None:
                ds_ref[g, :, rows] = ds
            p, ds = p.astype(v_ref.dtype), ds.astype(v_ref.dtype)
            dv_sum_ref[...] += dot(dout_ref[g, :, rows], p, ((1,), (1,)))
            dk_sum_ref[...] += dot(q_ref[g, :, rows], ds, ((1,), (1,)))
            dq_sum_ref[first_chunk + n] += dot(kt_ref[...], ds, ((1,), (0,)))

        def two_chunks(i, _):
            for here, there in ((0, 1), (1, 0)):
                n = 2 * i + here
                after = jnp.minimum(n + 1, chunks - 1)
                s, dp = products(after)
                gradients(n, buffers[here])
                keep(after, s, dp, buffers[there])
            return 0

        keep(0, *products(0), buffers[0])
        jax.lax.fori_loop(0, chunks // 2, two_chunks, 0)
        if chunks % 2:
            gradients(chunks - 1, buffers[0])

    jax.lax.cond(flags & MASKED != 0, lambda: multiply(True), lambda: multiply(False))

    @pl.when(flags & LAST != 0)
    def _():
        dk_ref[...] = (dk_sum_ref[...] * scale_of_dk).T.astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].T.astype(dv_ref.dtype)

    @pl.when(flags & LAST_OF_ROWS != 0)
    def _():
        def write(n, _):
            g, rows = place(n)
            dq = (dq_sum_ref[first_chunk + n] * scale).T.astype(dq_ref.dtype)
            if len(dq_ref.shape) == 2:
                d = dq.shape[1]
                dq_ref[rows, pl.ds(pl.multiple_of(g * d, LANES), d)] = dq
            else:
                dq_ref[g, rows, :] = dq
            return 0

        jax.lax.fori_loop(0, chunks, write, 0)
