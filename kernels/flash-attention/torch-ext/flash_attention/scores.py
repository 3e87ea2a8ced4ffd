"""What the forward and the backward kernel share: the scores of a chunk of rows against a block of keys, transposed.

Scores are held as (keys, rows). A row's maximum and sum then run over sublanes and are plain vector instructions, and
what belongs to a row (its interval, maximum, log-sum-exp) is a vector along lanes that is spread over sublanes for
nothing. Scores are in units of log 2: q is multiplied by log2(e) beforehand, so that the exponential is exp2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .reference import default_diag
from .visits import batch_of, key_block_of, row_block_of

LOG2_E = 1.4426950408889634
MATRIX_COLUMNS = (
    256  # of scores that are turned into probabilities before the next: a matrix unit of v6e and 7x is as wide
)


class ScoreRefs(NamedTuple):
    bias: Any  # (group | 1, block_q, block_k), or (group | 1, block_k, 1) for one row of bias
    slopes: Any  # (b, hq) in scalar memory, times log2(e)
    diag: Any  # (1, block_q)


def whole_blocks(lo, hi, lk, block_q):
    """Rows that see nothing, and rows past the last up to a whole block, as intervals from lk to 0."""
    sees = lo < hi
    pad = ((0, 0), (0, -lo.shape[1] % block_q))
    return (
        jnp.pad(jnp.where(sees, lo, lk), pad, constant_values=lk),
        jnp.pad(jnp.where(sees, jnp.minimum(hi, lk), 0), pad),
    )


def item_bytes(x) -> int:
    """To plan VMEM with: kernels take float16 as float32, which TPUs have."""
    return 4 if x.dtype == jnp.float16 else x.dtype.itemsize


def bias_heads(bias, group) -> int:
    """How many heads of bias a visit reads."""
    return 0 if bias is None else 1 if bias.shape[1] == 1 else group


def score_operands(q, k, bias, slopes, diag, block_q, block_k, row_spec):
    """The optional operands of a kernel, and their blocks."""
    (b, lq, hq, _), hk = q.shape, k.shape[2]
    operands, specs = [], []
    if bias is not None:
        heads = (hk, hq // hk) if bias.shape[1] > 1 else (1, 1)
        bias, spec = bias_operand(bias.reshape(bias.shape[0], *heads, *bias.shape[2:]), block_q, block_k)
        operands.append(bias)
        specs.append(spec)
    if slopes is not None:
        diag = default_diag(q, k) if diag is None else diag
        pad = ((0, 0), (0, -lq % block_q))
        diag = jnp.pad(jnp.broadcast_to(diag.astype(jnp.int32), (b, lq)), pad)
        operands += [jnp.broadcast_to(slopes.astype(jnp.float32) * LOG2_E, (b, hq)), diag[:, None]]
        specs += [pl.BlockSpec(memory_space=pltpu.SMEM), row_spec]
    return operands, specs


def bias_operand(bias, block_q, block_k):
    """(b | 1, hk | 1, group | 1, rows, keys) as it is, or with keys before a single row, which then is a column."""
    one_b, one_h, one_row = bias.shape[0] == 1, bias.shape[1] == 1, bias.shape[3] == 1
    group = bias.shape[2]

    def at(h, i, rows, keys, *_):
        row, key = row_block_of(rows[i]), key_block_of(keys[i])
        place = (key, 0) if one_row else (row, key)
        return 0 if one_b else batch_of(rows[i]), 0 if one_h else h, 0, *place

    if one_row:
        return bias.swapaxes(3, 4), pl.BlockSpec((None, None, group, block_k, 1), at)
    return bias, pl.BlockSpec((None, None, group, block_q, block_k), at)


def take_score_refs(refs: list, options) -> ScoreRefs:
    """The refs of score_operands, taken off the front."""
    bias = refs.pop(0) if options["bias"] else None
    slopes, diag = (refs.pop(0), refs.pop(0)) if options["slopes"] else (None, None)
    return ScoreRefs(bias, slopes, diag)


def place_of(n, per_head, chunk):
    """Chunk -> its head in the group, its rows."""
    if per_head == 1:
        return n, pl.ds(0, chunk)
    start = n % per_head * chunk
    return n // per_head, pl.ds(start if isinstance(n, int) else pl.multiple_of(start, chunk), chunk)


def write_mask(mask_ref, lo_ref, hi_ref, first_key):
    """mask_ref (chunks of a head, block_k, chunk): 0 where a row sees a key, else -inf. All heads share it."""
    per_head, block_k, chunk = mask_ref.shape

    def write(i, _):
        rows = place_of(i, per_head, chunk)[1]
        key = jax.lax.broadcasted_iota(jnp.int32, (block_k, chunk), 0)
        seen = (key >= lo_ref[:, rows] - first_key) & (key < hi_ref[:, rows] - first_key)
        mask_ref[i] = jnp.where(seen, 0.0, -jnp.inf)
        return 0

    jax.lax.fori_loop(0, per_head, write, 0)


def finish_scores(s, place, refs: ScoreRefs, softcap, first_head, batch, first_key, mask):
    """From q . k (block_k, chunk) to scores, and the derivative of the softcap, or None without one."""
    g, rows = place
    slope_of_cap = None
    if softcap:
        t = jnp.tanh(s)
        s, slope_of_cap = t * (softcap * LOG2_E), 1 - t * t
    if refs.bias is not None:
        of_head = refs.bias.at[g if refs.bias.shape[0] > 1 else 0]
        extra = of_head[...] if refs.bias.shape[2] == 1 else of_head[rows, :].astype(jnp.float32).T
        s = s + extra.astype(jnp.float32) * LOG2_E
    if refs.slopes is not None:
        slope = refs.slopes[batch, first_head + g]
        key = jax.lax.broadcasted_iota(jnp.int32, (s.shape[0], 1), 0)
        s = s - slope * jnp.abs((refs.diag[:, rows] - first_key - key).astype(jnp.float32))
    if mask is not None:
        s = jnp.where(mask[...] == 0, s, -jnp.inf)
    return s, slope_of_cap


def dot(left, right, contract):
    """In float32; float32 operands are not rounded to bfloat16."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        left, right, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
