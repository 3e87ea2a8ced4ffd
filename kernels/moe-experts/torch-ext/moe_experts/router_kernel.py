"""The router: every grid step takes a block of tokens, and picks their experts one after the other.

Shapes   logits (t, e), bias (e,) -> weights (t, top_k) in logits.dtype, index (t, top_k) int32
Grid     (cdiv(t, block_t),); a step walks its block by tiles of TILE tokens
Layout   a tile is turned, experts along sublanes and tokens along lanes, so that the best of all experts is found by
         comparing registers with each other, and only in the end within one
Order    scores are compared as integers, whose order is that of the numbers, with NaN above infinity; the smallest
         integer marks what is chosen already, or can't be
Edge     a partial last block is safe: tokens never mix, and rows past t are not written back
Limits   bound by comparing: 5 operations on each register of scores (6 with a bias) in each of top_k rounds
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .config import LANES, MIB
from .router_reference import TINY

SUBLANES = 8
TILE = 256  # tokens at once: two registers of lanes hide each other's latency, four don't fit
LARGEST_BLOCK_BYTES = 1024 * 1024
LARGEST_BLOCK_T = 1024
TAKEN, NAN = -(2**31), 2**31 - 1  # no number's integer


class Rule(NamedTuple):
    """What the arguments of router_topk ask for, of `e` experts in groups of `size`, `stride` rows apart."""

    e: int
    top_k: int
    score: str
    renormalize: bool
    scale: float
    groups: int
    top_groups: int
    best_of_group: int
    epsilon: float
    size: int
    stride: int


def router_topk_forward(
    logits: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 2,
    epsilon: float = TINY,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """(t, e), (e,) -> (t, top_k), (t, top_k). Arguments were checked in router.py."""
    t, e = logits.shape
    if t == 0:
        return jnp.zeros((0, top_k), logits.dtype), jnp.zeros((0, top_k), jnp.int32)
    if top_groups == groups:
        groups = top_groups = 1
    size = e // groups
    stride = _up(size, SUBLANES) if groups > 1 else size
    limit = groups, top_groups, best_of_group
    rule = Rule(groups * stride, top_k, score, renormalize, scale, *limit, epsilon, size, stride)
    wide = logits.astype(jnp.float32) if logits.dtype == jnp.float16 else logits  # TPUs load no float16
    if stride != size:  # groups have to start at a register
        wide = _spread(wide, rule, -jnp.inf)
        bias = None if bias is None else _spread(bias[None], rule, 0)[0]
    weights, index = _launch(wide, bias, rule, interpret)
    if stride != size:
        index -= index // stride * (stride - size)
    return weights.astype(logits.dtype), index


def _spread(array, rule: Rule, fill):
    """(t, groups * size) -> (t, groups * stride)"""
    by_group = array.reshape(array.shape[0], rule.groups, rule.size)
    padding = ((0, 0), (0, 0), (0, rule.stride - rule.size))
    return jnp.pad(by_group, padding, constant_values=fill).reshape(array.shape[0], rule.e)


def _launch(logits, bias, rule: Rule, interpret):
    t, e = logits.shape
    rows = _up(e, SUBLANES)
    block_t = block_of(t, e)

    def of_tokens(width):
        return pl.BlockSpec((block_t, width), lambda i: (i, 0))

    inputs, in_specs = [logits], [of_tokens(e)]
    if bias is not None:
        # Along all lanes already: the kernel would keep what it makes of a column in registers, more than there are.
        wide = jnp.broadcast_to(jnp.pad(bias.astype(jnp.float32), (0, rows - e))[:, None], (rows, LANES))
        inputs, in_specs = [*inputs, wide], [*in_specs, pl.BlockSpec((rows, LANES), lambda i: (0, 0))]
    tile = LANES if t <= LANES else TILE
    chosen = (_up(rule.top_k, SUBLANES), tile)
    scratch = [
        pltpu.VMEM((LANES, LANES), jnp.float32),
        pltpu.VMEM((rows, tile), jnp.float32),
        pltpu.VMEM((rows, tile), jnp.int32),
        pltpu.VMEM((_up(rule.groups, SUBLANES), tile), jnp.int32),
        pltpu.VMEM(chosen, jnp.float32),
        pltpu.VMEM(chosen, jnp.int32),
    ]
    return pl.pallas_call(
        functools.partial(_route_block, rule=rule, has_bias=bias is not None),
        grid=(pl.cdiv(t, block_t),),
        in_specs=in_specs,
        out_specs=[of_tokens(rule.top_k)] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((t, rule.top_k), logits.dtype),
            jax.ShapeDtypeStruct((t, rule.top_k), jnp.int32),
        ],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes(rule, block_t, tile)
        ),
        interpret=interpret,
        name="router_topk",
    )(*inputs)


def block_of(t: int, e: int) -> int:
    """Tokens per step: whole tiles, as many as there are or as a block may hold."""
    if t <= LANES:
        return LANES
    most = max(TILE, LARGEST_BLOCK_BYTES // (_up(e, LANES) * 4) // TILE * TILE)
    return min(_up(t, TILE), most, LARGEST_BLOCK_T)


def vmem_bytes(rule: Rule, block_t: int, tile: int) -> int:
    """Blocks of logits and of both results twice, scores and keys once, bias twice; and what the compiler needs."""
    blocks = 2 * block_t * (_up(rule.e, LANES) + 2 * _up(rule.top_k, LANES))
    rows = _up(rule.e, SUBLANES) * (2 * tile + 2 * LANES) + 2 * _up(rule.top_k, SUBLANES) * tile
    return max(16 * MIB, 4 * (blocks + rows) + 4 * MIB)


def _route_block(logits_ref, *refs, rule: Rule, has_bias: bool):
    bias_ref, refs = (refs[0], refs[1:]) if has_bias else (None, refs)
    weights_ref, index_ref, turn_ref, score_ref, key_ref, group_ref, weight_rows_ref, index_rows_ref = refs
    tile = key_ref.shape[1]

    def route_tile(n, carry):
        first = n * tile
        for part in range(0, tile, LANES):
            _turn(logits_ref, pl.multiple_of(first + part, LANES), turn_ref, score_ref, part)
        if rule.score == "softmax":
            _softmax(score_ref, rule)
        _make_keys(score_ref, bias_ref, key_ref, rule)
        if rule.groups > 1:
            _limit_groups(key_ref, group_ref, rule)
        _choose(key_ref, score_ref if has_bias else None, weight_rows_ref, index_rows_ref, rule)
        weights = _finish(weight_rows_ref, rule)
        tokens = pl.ds(pl.multiple_of(first, LANES), tile)
        weights_ref[tokens, :] = weights.T[:, : rule.top_k].astype(weights_ref.dtype)
        index_ref[tokens, :] = index_rows_ref[...].T[:, : rule.top_k]
        return carry

    jax.lax.fori_loop(0, logits_ref.shape[0] // tile, route_tile, 0)


def _turn(logits_ref, first, turn_ref, score_ref, lane: int):
    """LANES tokens of the block, from `first` on, to (rows, LANES) of scores; rows past e then hold anything."""
    e, rows = logits_ref.shape[1], score_ref.shape[0]
    for start in range(0, e, LANES):
        width = min(LANES, e - start)
        x = logits_ref[pl.ds(first, LANES), start : start + width].astype(jnp.float32)
        if width < LANES:  # only whole registers can be turned
            turn_ref[:, :width] = x
            x = turn_ref[...]
        stop = min(start + LANES, rows)
        score_ref[start:stop, lane : lane + LANES] = x.T[: stop - start]


def _softmax(score_ref, rule: Rule):
    registers = _registers(score_ref)
    last = registers[-1]
    score_ref[last, :] = _real(score_ref[last, :], rule.e - last.start, -jnp.inf)
    most = jnp.max(functools.reduce(jnp.maximum, (score_ref[rows, :] for rows in registers)), axis=0, keepdims=True)
    total = jnp.zeros((SUBLANES, score_ref.shape[1]), jnp.float32)
    for rows in registers:
        power = jnp.exp(score_ref[rows, :] - most)
        score_ref[rows, :] = power
        total += power
    scale = 1.0 / jnp.sum(total, axis=0, keepdims=True)
    for rows in registers:
        score_ref[rows, :] *= scale


def _make_keys(score_ref, bias_ref, key_ref, rule: Rule):
    for rows in _registers(score_ref):
        scores = score_ref[rows, :]
        if rule.score == "sigmoid":
            score_ref[rows, :] = scores = jax.nn.sigmoid(scores)
        choice = scores
        if bias_ref is not None:
            choice = scores + jnp.concatenate([bias_ref[rows, :]] * (scores.shape[1] // LANES), axis=1)
        key_ref[rows, :] = _real(_key_of(choice), rule.e - rows.start, TAKEN)


def _choose(key_ref, score_ref, weight_rows_ref, index_rows_ref, rule: Rule):
    """top_k times: the best key, at its first row; then it is taken. Rows past top_k keep what they held."""

    def step(k, carry):
        best, first, place = _best(key_ref, 0, key_ref.shape[0])
        scores = _take(key_ref, place, score_ref)
        weight = _number_of(best) if score_ref is None else jnp.sum(scores, axis=0, keepdims=True)
        weight_rows_ref[pl.ds(k, 1), :] = weight
        index_rows_ref[pl.ds(k, 1), :] = first
        return carry

    _times(rule.top_k, step)


def _finish(weight_rows_ref, rule: Rule):
    weights = weight_rows_ref[...]
    real = _row(weights) < rule.top_k
    if rule.score == "topk_softmax":
        power = jnp.exp(weights - jnp.max(jnp.where(real, weights, -jnp.inf), axis=0, keepdims=True))
        weights = power / jnp.sum(jnp.where(real, power, 0.0), axis=0, keepdims=True)
    elif rule.renormalize:
        weights = weights / (jnp.sum(jnp.where(real, weights, 0.0), axis=0, keepdims=True) + rule.epsilon)
    return weights if rule.scale == 1.0 else weights * rule.scale


def _limit_groups(key_ref, group_ref, rule: Rule):
    """Take every expert outside the top_groups groups whose best experts, two or one, have the largest sum."""

    def start(group):
        return group * rule.stride

    def add_up(group, carry):
        rows = pl.ds(pl.multiple_of(start(group), SUBLANES), rule.stride)
        keys = _real(key_ref[rows, :], rule.size, TAKEN)
        key_ref[rows, :] = keys
        best, _, place = _best(key_ref, start(group), rule.stride)
        total = _number_of(best)
        if rule.size > 1 and rule.best_of_group > 1:
            others = jnp.where(_at(place, rule.stride), TAKEN, keys)
            total += _number_of(jnp.max(others, axis=0, keepdims=True))
        group_ref[pl.ds(group, 1), :] = _key_of(total)
        return carry

    def keep_one(_, carry):
        _take(group_ref, _best(group_ref, 0, group_ref.shape[0])[2])
        return carry

    def drop(group, carry):
        rows = pl.ds(pl.multiple_of(start(group), SUBLANES), rule.stride)
        kept = group_ref[pl.ds(group, 1), :] == TAKEN
        key_ref[rows, :] = jnp.where(kept, key_ref[rows, :], TAKEN)
        return carry

    _times(rule.groups, add_up)
    group_ref[...] = _real(group_ref[...], rule.groups, TAKEN)
    _times(rule.top_groups, keep_one)
    _times(rule.groups, drop)


def _best(key_ref, start, count: int):
    """Of `count` rows of keys: the largest of each column and its first row, both (1, tile).

    And (SUBLANES, tile): the number of the register where it stands, in the sublane where it stands; else -1.
    """

    def among(first: int, last: int):
        """A tournament of registers; the later one has to be larger to win."""
        if last - first > 1:
            middle = (first + last) // 2
            (key, register), (later_key, later) = among(first, middle), among(middle, last)
            wins = later_key > key
            return jnp.where(wins, later_key, key), jnp.where(wins, later, register)
        key = key_ref[pl.ds(_aligned(start + first * SUBLANES), SUBLANES), :]
        return key, jnp.full(key.shape, first, jnp.int32)

    keys, registers = among(0, count // SUBLANES)
    best = jnp.max(keys, axis=0, keepdims=True)
    row = jnp.where(keys == best, registers * SUBLANES + _row(keys), count)
    first = jnp.min(row, axis=0, keepdims=True)
    return best, first, jnp.where(row == first, registers, -1)


def _take(key_ref, place, score_ref=None):
    """Mark what stands there. Returns its score where it stands, 0 in the other sublanes, (SUBLANES, tile)."""

    def take(register, scores):
        rows = pl.ds(_aligned(register * SUBLANES), SUBLANES)
        here = place == register
        key_ref[rows, :] = jnp.where(here, TAKEN, key_ref[rows, :])
        return scores if score_ref is None else jnp.where(here, score_ref[rows, :], scores)

    registers = key_ref.shape[0] // SUBLANES
    unroll = next(n for n in range(16, 0, -1) if registers % n == 0)
    return jax.lax.fori_loop(0, registers, take, jnp.zeros(place.shape, jnp.float32), unroll=unroll)


def _at(place, count: int):
    """(count, TILE): whether it stands there."""
    return jnp.concatenate([place == register for register in range(count // SUBLANES)], axis=0)


def _aligned(row):
    return row if isinstance(row, int) else pl.multiple_of(row, SUBLANES)


def _key_of(x):
    """An integer that orders like the number: negative ones have their bits reversed; no two zeros, no negative NaN."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(jnp.isnan(x), NAN, jnp.where(bits < 0, bits ^ NAN, bits))


def _number_of(key):
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ NAN, key), jnp.float32)


def _real(values, size: int, fill):
    """The first `size` rows; the others become `fill`."""
    return values if values.shape[0] <= size else jnp.where(_row(values) < size, values, fill)


def _registers(ref) -> list[slice]:
    return [slice(start, start + SUBLANES) for start in range(0, ref.shape[0], SUBLANES)]


def _row(array):
    return jax.lax.broadcasted_iota(jnp.int32, array.shape, 0)


def _times(count: int, step) -> None:
    jax.lax.fori_loop(0, count, step, 0)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
