"""Quantised weights (stored.py): whole ones, and blocks in VMEM, whose numbers leave their bytes to be multiplied.

A scale of a whole column multiplies the product's column instead of the weight's. So does one of some rows, whose
product is made apart, or in other rows of the same product. Only where groups of less than 128 rows meet more than a
few tokens, weights themselves are scaled, in float32, and rounded to the dtype of x.

The bytes need no rearranging: int8, uint8 seen as int4 (whose rows lie in registers in the order of stored.py) and, on
TPU7x, float8_e4m3fn become bfloat16 by an instruction. Earlier TPUs have it for float8_e4m3b11fnuz, the same bits but
for an exponent smaller by 4, with NaN at -0 and numbers where e4m3fn has NaN. So there, scales are taken 16 times, -0
is read as 0, and a column with a NaN is made NaN.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .blocks import dot
from .config import FEW_ROWS
from .stored import ALL, SQUARE, Stored, stored_as

NATIVE_FP8 = ("TPU7x",)  # kinds of device that have float8_e4m3fn
SUBLANES = 8
DEEPEST = 256  # rows of a weight that a matrix unit takes at once, where it takes the most
AS_B11, B11_SCALE = "fp8-as-b11", 16.0


def dequantize(data: jax.Array, scale: jax.Array, rows: int, dtype: Any) -> jax.Array:
    """(e, in or in / 2, out), (e, a, b) -> (e, in, out): whole weights, by XLA."""
    if data.dtype == jnp.uint8:
        signed = jax.lax.bitcast_convert_type(data, jnp.int8)
        halves = jnp.stack((jnp.left_shift(signed, 4) >> 4, signed >> 4), axis=2)  # shifts of int8 keep the sign
        data = halves.reshape(data.shape[0], -1, data.shape[2])[:, :rows]
    _, rows, columns = data.shape
    stored = stored_as(data.dtype, scale.shape, rows, columns)
    scale = _spread(_spread(scale, 1, stored.rows, rows), 2, stored.columns, columns)
    return (data.astype(jnp.float32) * scale).astype(dtype)


def _spread(scale, axis: int, block: int, size: int):
    """A scale to each of the numbers that share it, but for one that all share."""
    return scale if block == ALL else jax.lax.slice_in_dim(jnp.repeat(scale, block, axis=axis), 0, size, axis=axis)


def for_device(stored: Stored, device_kind: str | None) -> Stored:
    """How `Quantized` takes a weight on that TPU."""
    return replace(stored, kind=AS_B11) if stored.kind == "fp8" and device_kind not in NATIVE_FP8 else stored


class Plain(NamedTuple):
    """A block in VMEM of a weight as it is, (in, out) or (out, in)."""

    weight: Any
    transposed: bool

    def times(self, x, columns, row=0, all_columns=None):
        weight = self.weight[:, columns] if self.transposed else self.weight[columns, :]
        return dot(x, weight, self.transposed)

    def scaled(self, product, all_columns):
        return product


class Quantized(NamedTuple):
    """A block in VMEM of a quantised weight (in, out), and the scales of the whole one."""

    data: Any
    scale: Any
    stored: Stored

    def times(self, x, columns, row=0, all_columns=None):
        """x @ these columns; x belongs to rows from `row` on, and the columns are `all_columns` of the whole weight."""
        rows, group = x.shape[1], self.stored.rows
        if group == ALL:
            numbers, full = self._numbers(0, rows, columns, x.dtype)
            return dot(x, numbers, True) + _nan_where(full)
        first = row // group if isinstance(row, int) else jax.lax.div(row, group)
        total, all_full = 0.0, []
        span = _rows_at_once(x.shape[0], group)
        for start in range(0, rows, span):
            size = min(span, rows - start)
            numbers, full = self._numbers(
                start, size, columns, x.dtype if x.shape[0] <= FEW_ROWS or group == SQUARE else jnp.float32
            )
            scales = [
                self._scales(pl.ds(first + n // group, 1), all_columns) for n in range(start, start + size, group)
            ]
            total += _grouped_dot(x[:, start : start + size], numbers, scales, group)
            all_full += full
        return total + _nan_where(all_full)

    def _numbers(self, start: int, size: int, columns, dtype):
        """Rows of the weight without their scales; for float8 also what shows in which columns there is a NaN."""
        data_rows, full = pl.ds(self.stored.data_rows(start), self.stored.data_rows(size)), []
        block = self.data[data_rows, columns]
        if self.stored.kind == "int4":
            block = pltpu.bitcast(block, jnp.int4)
        elif self.stored.kind == AS_B11:
            block, full = _in_b11(block)
        return block.astype(dtype), full

    def scaled(self, product, all_columns):
        """What remains to do with a finished sum of `times`."""
        if self.stored.rows != ALL:
            return product
        return product * self._scales(slice(None), all_columns)

    def _scales(self, rows, columns):
        scales = self.scale[rows, slice(None) if self.stored.columns == ALL else columns]
        return scales * B11_SCALE if self.stored.kind == AS_B11 else scales


def _rows_at_once(m: int, group: int) -> int:
    """How many rows of a weight one product of m rows of x takes: of several groups, if m for each make but few."""
    return DEEPEST if DEEPEST // group * m <= FEW_ROWS else SQUARE


def _grouped_dot(x, numbers, scales, group: int):
    """(m, n) @ (n, columns), where each `group` of the n rows has its own scale (1, columns)."""
    m = x.shape[0]
    if len(scales) == 1:
        return dot(x, numbers, True) * scales[0]
    if m > FEW_ROWS:
        scaled = [numbers[n * group : (n + 1) * group] * scale for n, scale in enumerate(scales)]
        return dot(x, jnp.concatenate(scaled).astype(x.dtype), True)
    # All of them in one product, which takes more rows of x at no cost: each group has its own, with zeros elsewhere.
    # In float32, whose rows can be moved one by one.
    groups, wide, shape = len(scales), x.astype(jnp.float32), (len(scales) * m, x.shape[1])
    row_of, column_of = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    repeated = jnp.broadcast_to(wide, shape) if m == 1 else jnp.concatenate([wide] * groups)
    products = dot(jnp.where(row_of // m == column_of // group, repeated, 0.0).astype(x.dtype), numbers, True)
    if m == 1 and groups == SUBLANES:  # a register holds a row of each
        return jnp.sum(products * jnp.concatenate(scales), axis=0, keepdims=True)
    return sum(products[n * m : (n + 1) * m] * scale for n, scale in enumerate(scales))


def _in_b11(block):
    """float8_e4m3fn -> the same numbers over 16 as float8_e4m3b11fnuz, and (rows, columns) of words for _nan_where."""
    ones = 0x01010101
    words = pltpu.bitcast(block, jnp.int32)
    low = words & jnp.int32(0x7F * ones)
    words &= (low + jnp.int32(0x7F * ones)) | jnp.int32(0x7F * ones)  # no sign where all else is zero
    full = low + jnp.int32(ones)  # a byte's top bit where all else was set
    return pltpu.bitcast(words, jnp.float8_e4m3b11fnuz), [
        full[n : n + SUBLANES] for n in range(0, full.shape[0], SUBLANES)
    ]


def _nan_where(full):
    """(1, columns): NaN where a byte of the column was NaN, else zero."""
    if not full:
        return 0.0
    found = functools.reduce(jnp.bitwise_or, full) & jnp.int32(-0x7F7F7F80)
    return jnp.where(jnp.max(jnp.where(found != 0, 1.0, 0.0), axis=0, keepdims=True) > 0, jnp.nan, 0.0)


def blocks_of(weight_refs, scale_refs, spread_refs, new_expert, stored: tuple[Stored, ...], transposed: bool) -> list:
    """Each weight's block in VMEM. Scales of 128 columns are spread over them when an expert is new."""
    if not stored:
        return [Plain(ref, transposed) for ref in weight_refs]
    unused, quantized = list(spread_refs), []
    for data_ref, scale_ref, one in zip(weight_refs, scale_refs, stored, strict=True):
        if one.columns == SQUARE:
            spread_ref = unused.pop(0)
            pl.when(new_expert)(functools.partial(_spread_columns, scale_ref, spread_ref))
            scale_ref = spread_ref
        quantized.append(Quantized(data_ref, scale_ref, one))
    return quantized


def spread_scratch(scales, stored: tuple[Stored, ...], columns: tuple[int, ...]) -> list:
    """Room for them, of weights with so many columns; for none, without quantised weights."""
    return [
        pltpu.VMEM((scale.shape[1], size), jnp.float32)
        for scale, one, size in zip(scales, stored, columns, strict=False)
        if one.columns == SQUARE
    ]


def _spread_columns(scale_ref, spread_ref) -> None:
    """(a, b) -> (a, out)."""
    for n in range(scale_ref.shape[1]):
        columns = slice(n * SQUARE, min((n + 1) * SQUARE, spread_ref.shape[1]))
        shape = (spread_ref.shape[0], columns.stop - columns.start)
        spread_ref[:, columns] = jnp.broadcast_to(scale_ref[:, n : n + 1], shape)
