"""What a visit of a prefill does, in four steps: take rows, gate their first product, multiply again, add to the sums.

A row that is taken from somewhere has to lie in whole (8, 128) registers of 32-bit words. So rows of x are stacks of
words (t, g, 128), where a word of bfloat16 holds columns c and c + h / 2, and sums are stacks (t, h / 128, 128); a
reshape of some rows makes a matrix of them, or back.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .blocks import for_chunks
from .config import LANES, PrefillConfig, Sizes
from .gates import Gating
from .quantized_blocks import blocks_of

ROWS_AT_ONCE = 16  # per round of a loop: enough to hide the way to an address


class Steps(NamedTuple):
    """Bodies of kernels. First come the visits' experts, first slots and rows, and the slots' tokens and weights."""

    sizes: Sizes
    gating: Gating
    config: PrefillConfig
    has_bias: bool

    def both(self, expert_ref, first_ref, rows_ref, tokens_ref, weights_ref, words_ref, gate_up_ref, down_ref, *refs):
        """words, gate_up, down, both biases and scales or none -> sums."""
        biases, scales, (sums_ref, taken_ref, x_ref, gated_ref, results_ref, *spread) = self._parted(refs, 2)
        gate_up, down = self._weights((gate_up_ref, down_ref), scales, spread, expert_ref, slice(None))
        slot, rows = first_ref[pl.program_id(0)], rows_ref[pl.program_id(0)]
        _clear_at_first(sums_ref)
        _take(slot, tokens_ref, words_ref, taken_ref, x_ref)
        self._gate(x_ref, gate_up, biases[:1], gated_ref)
        self._multiply(gated_ref, down, biases[1:], results_ref)
        _add(slot, rows, tokens_ref, weights_ref, results_ref, sums_ref)

    def first(self, expert_ref, first_ref, rows_ref, tokens_ref, weights_ref, words_ref, gate_up_ref, *refs):
        """words, gate_up, its bias and scales or none -> gated rows of the visit."""
        biases, scales, (gated_ref, taken_ref, x_ref, *spread) = self._parted(refs, 1)
        (gate_up,) = self._weights((gate_up_ref,), scales, spread, expert_ref, slice(0, 1))
        _take(first_ref[pl.program_id(0)], tokens_ref, words_ref, taken_ref, x_ref)
        self._gate(x_ref, gate_up, biases, gated_ref)

    def second(self, expert_ref, first_ref, rows_ref, tokens_ref, weights_ref, gated_ref, down_ref, *refs):
        """gated rows of the visit, down, its bias and scales or none -> sums."""
        biases, scales, (sums_ref, results_ref, *spread) = self._parted(refs, 1)
        (down,) = self._weights((down_ref,), scales, spread, expert_ref, slice(1, 2))
        slot, rows = first_ref[pl.program_id(0)], rows_ref[pl.program_id(0)]
        _clear_at_first(sums_ref)
        self._multiply(gated_ref, down, biases, results_ref)
        _add(slot, rows, tokens_ref, weights_ref, results_ref, sums_ref)

    def _parted(self, refs, weights: int):
        """Biases and scales of so many weights, where there are any, and what comes after them."""
        biases = weights if self.has_bias else 0
        scales = weights if self.sizes.stored else 0
        return refs[:biases], refs[biases : biases + scales], refs[biases + scales :]

    def _weights(self, weight_refs, scales, spread, expert_ref, which):
        visit = pl.program_id(0)
        new = (visit == 0) | (expert_ref[visit] != expert_ref[jnp.maximum(visit - 1, 0)])
        return blocks_of(weight_refs, scales, spread, new, self.sizes.stored[which], self.sizes.transposed)

    def _gate(self, x_ref, gate_up, bias_refs, gated_ref):
        gating, w, i = self.gating, self.sizes.w, self.sizes.i

        def read(columns):
            product = gate_up.scaled(gate_up.times(x_ref[...], columns, 0, columns), columns)
            return product + bias_refs[0][:, columns].astype(jnp.float32) if bias_refs else product

        def gate(start, size):
            gated_ref[:, pl.ds(start, size)] = gating.columns_of(read, start, size, w).astype(gated_ref.dtype)

        if gating.gate == "concatenated" and i % LANES:  # up starts within a register: part products, not weights
            gated_ref[...] = gating.of(read(pl.ds(0, w))).astype(gated_ref.dtype)
        else:
            for_chunks(i, gating.chunk(w, self.config.gate_chunk), gate)

    def _multiply(self, gated_ref, down, bias_refs, results_ref):
        def multiply(start, size):
            columns = pl.ds(start, size)
            y = down.scaled(down.times(gated_ref[...], columns, 0, columns), columns)
            if bias_refs:
                y += bias_refs[0][:, columns].astype(jnp.float32)
            stack = pl.ds(start // LANES if isinstance(start, int) else jax.lax.div(start, LANES), size // LANES)
            results_ref[:, stack, :] = y.reshape(y.shape[0], size // LANES, LANES)

        for_chunks(self.sizes.h, self.config.chunk, multiply)


def _take(slot, tokens_ref, words_ref, taken_ref, x_ref):
    def take(batch, carry):
        for row in _batch(batch):
            taken_ref[row] = words_ref[tokens_ref[slot + row]]
        return carry

    jax.lax.fori_loop(0, taken_ref.shape[0] // ROWS_AT_ONCE, take, 0)
    _write_rows(x_ref, taken_ref)


def _add(slot, rows, tokens_ref, weights_ref, results_ref, sums_ref):
    past = sums_ref.shape[0] - 1

    def add(batch, carry):
        totals = []
        for row in _batch(batch):
            token = jnp.where(row < rows, tokens_ref[slot + row], past)
            totals.append((token, sums_ref[token] + weights_ref[slot + row] * results_ref[row]))
        for token, total in totals:  # after all are read: the compiler can't know that tokens differ
            sums_ref[token] = total
        return carry

    jax.lax.fori_loop(0, results_ref.shape[0] // ROWS_AT_ONCE, add, 0)


def _batch(batch):
    return [batch * ROWS_AT_ONCE + n for n in range(ROWS_AT_ONCE)]


def _clear_at_first(ref):
    def clear(row, carry):
        ref[row] = jnp.zeros(ref.shape[1:], ref.dtype)
        return carry

    @pl.when(pl.program_id(0) == 0)
    def _():
        jax.lax.fori_loop(0, ref.shape[0], clear, 0)


def to_words(x):
    """(t, h) -> (t, g, 128): float32 as it is, with g = h / 128; two of bfloat16 in an int32, with g = h / 256."""
    t, h = x.shape
    if x.dtype == jnp.float32:
        return x.reshape(t, h // LANES, LANES)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    pairs = bits[:, h // 2 :] << 16 | bits[:, : h // 2]
    return jax.lax.bitcast_convert_type(pairs, jnp.int32).reshape(t, h // 2 // LANES, LANES)


def _write_rows(x_ref, taken_ref):
    """The inverse of to_words, (block_m, g, 128) -> (block_m, h)."""
    words, half = taken_ref[...].reshape(taken_ref.shape[0], -1), x_ref.shape[1] // 2
    if words.dtype == jnp.float32:
        x_ref[...] = words
    else:
        x_ref[:, :half] = pltpu.bitcast(words << 16, jnp.float32).astype(x_ref.dtype)
        x_ref[:, half:] = pltpu.bitcast(words & jnp.int32(-65536), jnp.float32).astype(x_ref.dtype)
