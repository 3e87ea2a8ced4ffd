"""What all kernels share: the walk over the tiles of a block, and the arithmetic of one tile."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .config import LANES

CHUNK = 256  # columns held in registers at a time
UNROLLED_CHUNKS = 32  # more chunks than this are walked by a loop, so that code does not grow with n


class Order(NamedTuple):
    """Where the weight comes in: `float32_scale` multiplies before the one rounding, `zero_centered` by 1 + weight."""

    eps: float
    zero_centered: bool
    float32_scale: bool

    def output_dtype(self, x_dtype, weight_dtype):
        return x_dtype if self.float32_scale else jnp.promote_types(x_dtype, weight_dtype)

    def scale(self, weight):
        """Weight as the float32 factor that x / rms(x) is multiplied by."""
        weight = weight.astype(jnp.float32)
        return weight + 1.0 if self.zero_centered else weight

    def apply(self, unit, weight, x_dtype, y_dtype):
        """x / rms(x) in float32 -> y."""
        if self.float32_scale:
            return (unit * self.scale(weight)).astype(y_dtype)
        return unit.astype(x_dtype).astype(y_dtype) * weight.astype(y_dtype)


def walk_tiles(block_m: int, tile_m: int, n: int, *, terms, finish, write, rows_left=None) -> None:
    """Over the tiles of a block: sum `terms` over columns, `finish` the sums, `write` the tile.

        step      0            1            2
        sums of   tile 1       tile 2       tile 3      (tile 0 before the loop)
        write     tile 0       tile 1       tile 2

    Neither half of a step waits for the other, so the units that add across lanes work beside those that multiply;
    and what a tile needs is loaded again when it is written, instead of waiting in registers that are too few.

    `terms(rows, cols)` gives float32 arrays; `finish` gets as many (tile_m, 1) sums and returns what
    `write(rows, cols, finished, valid)` needs. With `rows_left` below block_m (traced), tiles past it are left out,
    and the tile that it cuts gets `valid` (tile_m, 1); everywhere else `valid` is None.
    """
    count = block_m // tile_m

    def tile(i):
        return pl.ds(0, tile_m) if count == 1 else pl.ds(pl.multiple_of(i * tile_m, tile_m), tile_m)

    def measure(i):
        return finish(*_sum_columns(tile_m, n, lambda cols: terms(tile(i), cols)))

    def step(i, finished):
        ahead = tile(jnp.minimum(i + 1, count - 1))
        sums = _sum_columns(
            tile_m, n, lambda cols: terms(ahead, cols), beside=lambda cols: write(tile(i), cols, finished, None)
        )
        return finish(*sums)

    def write_only(i, finished, valid=None):
        fold_chunks(n, lambda cols, carry: write(tile(i), cols, finished, valid), None)

    if rows_left is None:
        finished = jax.lax.fori_loop(0, count - 1, step, measure(0)) if count > 1 else measure(0)
        write_only(count - 1, finished)
        return
    rows_left = jnp.minimum(rows_left, block_m)
    whole = jax.lax.div(rows_left, tile_m)  # `//` would ask for the device's kind, which only a TPU host knows
    finished = jax.lax.fori_loop(0, whole, step, measure(0))

    @pl.when(whole * tile_m < rows_left)
    def _():
        row = whole * tile_m + jax.lax.broadcasted_iota(jnp.int32, (tile_m, 1), 0)
        write_only(whole, finished, valid=row < rows_left)


def fold_chunks(n: int, step, carry):
    """`carry = step(cols, carry)` over slices that cover n columns; all but the last have CHUNK columns."""
    count, rest = divmod(n, CHUNK)
    if count <= UNROLLED_CHUNKS:
        for index in range(count):
            carry = step(pl.ds(index * CHUNK, CHUNK), carry)
    else:
        carry = jax.lax.fori_loop(0, count, lambda i, c: step(pl.ds(pl.multiple_of(i * CHUNK, CHUNK), CHUNK), c), carry)
    return step(pl.ds(count * CHUNK, rest), carry) if rest else carry


def sum_lanes(block):
    """(rows, columns) -> (rows, LANES): registers are added to registers, lanes stay apart. LANES divides columns."""
    return sum(block[:, start : start + LANES] for start in range(0, block.shape[1], LANES))


def _sum_columns(tile_m: int, n: int, terms, beside=None):
    """Sum each array of `terms(cols)` over all columns -> (tile_m, 1) each; call `beside(cols)` on the way."""
    whole = n // LANES * LANES

    def add(cols, sums):
        if beside is not None:
            beside(cols)
        return tuple(total + sum_lanes(term) for total, term in zip(sums, terms(cols), strict=True))

    totals = ()
    if whole:
        number = len(jax.eval_shape(lambda: terms(pl.ds(0, LANES))))
        lanes = fold_chunks(whole, add, (jnp.zeros((tile_m, LANES), jnp.float32),) * number)
        totals = tuple(jnp.sum(lane, axis=1, keepdims=True) for lane in lanes)
    if n > whole:
        tail = pl.ds(whole, n - whole)
        if beside is not None:
            beside(tail)
        rest = tuple(jnp.sum(term, axis=1, keepdims=True) for term in terms(tail))
        totals = tuple(map(jnp.add, totals, rest)) if totals else rest
    return totals
