"""What the kernel of paged.py does in a visit: wait for its pages, start the copies for a later one, and add it up.

The softmax is the usual one in parts: a running maximum per row, by which sums and values so far are scaled down.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .paged_config import LANES, PagedConfig, PagedSizes

SLOTS = 3  # blocks of pages in VMEM: two are on their way while one is computed
# Starting a copy takes nothing but the scalar unit, some four bundles, but no read of VMEM moves across it: all of them
# in one place would leave the other units idle.
COPIES_AT_ONCE = 8
LOG2E = 1.4426950408889634
# Scores that do not count, and the least maximum: the former stay far below the latter, so that their weight is 0.
MASKED, LEAST = -1e30, -1e29


class Rule(NamedTuple):
    """What is computed of the scores, and which count."""

    scale: float
    softcap: float  # 0: none
    window: int | None  # keys before a query's own that it sees
    causal: bool


def visit_block(
    tile_ref, block_ref, first_page_ref, past_key_ref, position_ref, sequence_ref, pages_ref, q_ref, *refs,
    sizes: PagedSizes, rule: Rule, config: PagedConfig, most_pages: int, has_sinks: bool,
    interpreted: bool,
):  # fmt: skip
    *sinks_refs, k_hbm, v_hbm, out_ref, k_ref, v_ref, copied, scores_ref, max_ref, sum_ref, acc_ref = refs
    visit, visits = pl.program_id(0), pl.num_programs(0)
    block_pages = config.block_pages

    def pages_of(visit):
        """The first page of a visit among those of its tile's sequence, and how many there are."""
        tile = tile_ref[visit]
        first = first_page_ref[tile] + block_ref[visit] * block_pages
        past = jax.lax.div(past_key_ref[tile] + sizes.page_size - 1, sizes.page_size)
        return first, jnp.clip(past - first, 0, block_pages)

    def places(first, some):
        return pl.ds(first * sizes.page_rows, some * sizes.page_rows)

    def copies_of(visit, slot):
        """A function for each page of a block, which starts its copies if the visit has such a page."""
        this = jnp.minimum(visit, visits - 1)
        first, count = pages_of(this)
        count = jnp.where(visit < visits, count, 0)
        entry = sequence_ref[tile_ref[this]] * most_pages + first

        def start(n):
            page = pages_ref[entry + n]  # read in any case: then the compiler makes no branch of what follows

            @pl.when(n < count)
            def _():
                for hbm, ref in ((k_hbm, k_ref), (v_hbm, v_ref)):
                    pltpu.make_async_copy(hbm.at[page], ref.at[slot, places(n, 1)], copied.at[slot]).start()

        return [functools.partial(start, n) for n in range(block_pages)]

    @pl.when(visit == 0)
    def _():
        for n in range(SLOTS - 1):
            for start in copies_of(n, n):
                start()

    slot = jax.lax.rem(visit, SLOTS)
    first_page, count = pages_of(visit)
    length = block_pages
    while length:  # in powers of two, since a wait is for a constant length, wherever it lies

        @pl.when(jax.lax.bitwise_and(count, length) != 0)
        def _(length=length):
            for ref in (k_ref, v_ref):
                arrived = ref.at[slot, places(0, length)]
                pltpu.make_async_copy(arrived, arrived, copied.at[slot]).wait()

        length //= 2

    tile = tile_ref[visit]
    sees = _Sees(first_page * sizes.page_size, position_ref[tile], past_key_ref[tile], rule, sizes, config.block_q)
    block = _Block(k_ref.at[slot], v_ref.at[slot], sizes, config.chunk, interpreted)
    states = (scores_ref, max_ref, sum_ref, acc_ref)
    is_first = block_ref[visit] == 0

    def update(masked):
        copies = copies_of(visit + SLOTS - 1, jax.lax.rem(visit + SLOTS - 1, SLOTS))
        _add_block(q_ref, block, states, is_first, sees if masked else None, rule, sizes, copies)

    if config.block_q == 1:
        update(True)  # the masks fit beside what the matrix units do
    else:
        jax.lax.cond(sees.all_of(block.tokens), lambda: update(False), lambda: update(True))

    @pl.when((visit + 1 == visits) | (block_ref[jnp.minimum(visit + 1, visits - 1)] == 0))
    def _():
        for i in range(sizes.sets):
            total = jnp.sum(sum_ref[i], axis=1, keepdims=True)
            if has_sinks:
                total += jnp.exp2(sinks_refs[0][i] - max_ref[i])[:, :1]
            # Without keys both are 0, and with a sink but no keys the sum is infinite.
            out_ref[i] = (acc_ref[i] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)


def _add_block(q_ref, block: _Block, states, is_first, sees: _Sees | None, rule: Rule, sizes: PagedSizes, meanwhile):
    """The scores of all sets, their maxima, the weighted values. Sets take turns: one fills what another waits for.

    meanwhile   starts of the copies for a later visit
    """
    scores_ref, max_ref, sum_ref, acc_ref = states
    sets, rows = range(sizes.sets), q_ref.shape[1]
    maxima = [jnp.full((rows, LANES), LEAST) for _ in sets]
    chunks = block.chunks()
    a_turn = max(COPIES_AT_ONCE, -(-len(meanwhile) // len(chunks)))
    for turn, columns in enumerate(chunks):
        counts = _both(_same_head(rows, columns, sizes), None if sees is None else sees.mask(rows, columns))
        for i in sets:
            scores = _dot(q_ref[i], block.keys(i, columns), 1)
            if rule.softcap:
                scores = jnp.tanh(scores * (rule.scale / rule.softcap)) * (rule.softcap * LOG2E)
            else:
                scores = scores * (rule.scale * LOG2E)
            if counts is not None:
                scores = jnp.where(counts, scores, MASKED)
            scores_ref[i, :, columns] = scores
            maxima[i] = _fold(jnp.maximum, maxima[i], scores)
        for act in meanwhile[turn * a_turn : (turn + 1) * a_turn]:
            act()

    sums, accs = [], []
    for i in sets:
        before = jnp.where(is_first, LEAST, max_ref[i])  # (rows, 128), all lanes alike
        maxima[i] = jnp.maximum(before, jnp.max(maxima[i], axis=1, keepdims=True))
        shrink = jnp.exp2(before - maxima[i])
        max_ref[i] = maxima[i]
        sums.append(jnp.where(is_first, 0.0, sum_ref[i]) * shrink)
        accs.append(jnp.where(is_first, 0.0, acc_ref[i]) * _as_wide(shrink, sizes.dv))

    for columns in chunks:
        for i in sets:
            weights = jnp.exp2(scores_ref[i, :, columns] - _as_wide(maxima[i], block.chunk))
            sums[i] = _fold(jnp.add, sums[i], weights)
            values = block.values(i, columns, None if sees is None else sees.tokens)
            accs[i] += _dot(weights.astype(values.dtype), values, 0)
    for i in sets:
        sum_ref[i], acc_ref[i] = sums[i], accs[i]


class _Block:
    """The keys and values of a visit. Column c of a set holds token c // heads and head c % heads of that set."""

    def __init__(self, k_ref, v_ref, sizes: PagedSizes, chunk: int, interpreted: bool):
        self.refs, self.sizes, self.chunk, self.interpreted = (k_ref, v_ref), sizes, chunk, interpreted
        self.tokens = k_ref.shape[0] // sizes.hk

    def chunks(self):
        return [pl.ds(start, self.chunk) for start in range(0, self.tokens * self.sizes.heads, self.chunk)]

    def keys(self, i: int, columns):
        return self._rows(self.refs[0], i, columns)

    def values(self, i: int, columns, tokens):
        """Those of tokens past the context are 0, since 0 * NaN is NaN."""
        values = self._rows(self.refs[1], i, columns)
        if tokens is None:
            return values
        words = pltpu.bitcast(values, jnp.uint32)
        pack = self.sizes.pack
        row = jax.lax.broadcasted_iota(jnp.int32, words.shape, 0) * pack  # the first of each word
        left = tokens * self.sizes.heads - columns.start
        words = jnp.where(row < left, words, jnp.uint32(0))
        if self.sizes.heads % pack:  # the context may end within a word: its first row is the lower half
            words = jnp.where(row + 1 < left, words, words & jnp.uint32(0xFFFF))
        return pltpu.bitcast(words, values.dtype)

    def _rows(self, ref, i: int, columns):
        """(chunk, d) of the keys or values of a set."""
        sets, heads = self.sizes.sets, self.sizes.heads
        if sets == 1:
            return ref[columns, :]
        if self.interpreted:  # which has no views of another dtype
            rows = ref[pl.ds(columns.start * sets, columns.size * sets), :]
            return rows.reshape(-1, sets, heads, rows.shape[1])[:, i].reshape(columns.size, -1)
        pack = self.sizes.pack
        stride = self.sizes.hk // pack
        tokens = pl.ds(columns.start // heads * stride + i * heads // pack, columns.size // heads, stride)
        words = ref.bitcast(jnp.uint32)[tokens, :]
        if heads == pack:
            return pltpu.bitcast(words, ref.dtype)
        # Of two rows in a word the first is the lower half. A half with zeros below is the same number in float32.
        words = words & jnp.uint32(0xFFFF0000) if i % pack else words << 16
        return pltpu.bitcast(words, jnp.float32).astype(ref.dtype)


class _Sees(NamedTuple):
    """Which keys of a block the rows of a tile see."""

    first_token: jax.Array  # of the block, in the sequence
    position: jax.Array  # of the tile's first query
    past_key: jax.Array  # of the tile
    rule: Rule
    sizes: PagedSizes
    block_q: int

    @property
    def tokens(self):
        """How many tokens of the block are part of the sequence, as far as the tile sees it."""
        return self.past_key - self.first_token

    def all_of(self, tokens: int):
        """Whether every row sees the whole block."""
        past, window = self.past_key, self.rule.window
        if self.rule.causal:
            past = jnp.minimum(past, self.position + 1)
        whole = self.first_token + tokens <= past
        return whole if window is None else whole & (self.first_token >= self.position + self.block_q - 1 - window)

    def mask(self, rows: int, columns):
        """(rows, chunk)"""
        shape = (rows, columns.size)
        column = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + columns.start
        token = self.first_token + jax.lax.div(column, self.sizes.heads)
        seen = token < self.past_key
        per_query = self.sizes.heads * self.sizes.group
        position = self.position
        if self.block_q > 1:
            position = position + jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, shape, 0), per_query)
        if self.rule.causal:
            seen &= token <= position
        if self.rule.window is not None:
            seen &= token >= position - self.rule.window
        return seen


def _same_head(rows: int, columns, sizes: PagedSizes):
    """(rows, chunk): whether row and column belong to one key head. None: there is but one in a set."""
    heads, group = sizes.heads, sizes.group
    if heads == 1:
        return None
    repeats = columns.size // LANES if LANES % heads == 0 and columns.size % LANES == 0 else 1
    shape = (rows, columns.size // repeats)
    of_row = jax.lax.rem(jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, shape, 0), group), heads)
    of_column = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, shape, 1) + columns.start % heads, heads)
    return jnp.concatenate([of_row == of_column] * repeats, axis=1)


def _both(one, other):
    return other if one is None else one if other is None else one & other


def _as_wide(x, size: int):
    """The columns of x over and over; a register is used several times, nothing moves where both are whole ones."""
    if size < x.shape[1]:
        return x[:, :size]
    if size % x.shape[1] == 0:
        return jnp.concatenate([x] * (size // x.shape[1]), axis=1)
    return jnp.broadcast_to(x[:, :1], (x.shape[0], size))


def _fold(op, total, x):
    """Combine the columns of x into 128 totals per row."""
    size = x.shape[1] // LANES * LANES
    for start in range(0, size, LANES):
        total = op(total, x[:, start : start + LANES])
    if size == x.shape[1]:
        return total
    reduce, neutral = (jnp.max, LEAST) if op is jnp.maximum else (jnp.sum, 0.0)
    rest = reduce(x[:, size:], axis=1, keepdims=True)
    lane = jax.lax.broadcasted_iota(jnp.int32, total.shape, 1)
    return op(total, jnp.where(lane == 0, rest, neutral))


def _dot(x, y, y_axis: int):
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (y_axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
