"""What all kernels share: the walk over the tiles of a block, and the arithmetic of one tile."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .config import LANES

CHUNK = 256  # columns worked on at a time: two registers of float32, one of bfloat16
UNROLLED_CHUNKS = 32  # so many without a loop around them, so that code does not grow with n
FEW_REGISTERS = 16  # of each operand in a round, where rounds are all that keeps values from waiting in registers


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


def walk_tiles(block_m: int, tile_m: int, n: int, *, terms, finish, write) -> None:
    """Over the tiles of a block: sum `terms` over columns, `finish` the sums, `write` the tile.

        round     0         1         2         3
        sums of   tile 0    tile 1    tile 2    tile 3
        finish              tile 0    tile 1    tile 2
        write                         tile 0    tile 1

    Nothing in a round waits for anything else in it, so all units have work while lanes are added up, which takes as
    long as the sums of a tile; and the compiler sees no reason to load early what it then has to spill. A tile is
    loaded again when it is written. Rounds are those of loops, because loads are not moved from one to another.

    `terms(rows, cols)` gives float32 arrays; `finish` gets as many (tile_m, 1) sums and returns factors of that shape;
    `write(rows, cols, *factors)` gets them as wide as `cols`.
    """
    count = block_m // tile_m

    def tile(i):
        return pl.ds(pl.multiple_of(i * tile_m, tile_m), tile_m)

    def sum_tile(rows, beside=None, unrolled=None):
        return _sum_columns(tile_m, n, lambda cols: terms(rows, cols), beside, unrolled)

    def finish_sums(sums):
        found = finish(*(jnp.sum(lanes, axis=1, keepdims=True) for lanes in sums))
        return tuple(jnp.broadcast_to(factor, (tile_m, LANES)) for factor in found)

    def write_columns(rows, factors):
        return lambda cols: write(rows, cols, *(_widen(factor, cols.size) for factor in factors))

    def write_tile(rows, factors, unrolled=None):
        for_chunks(n, write_columns(rows, factors), unrolled)

    if count == 1:
        rows = pl.ds(0, tile_m)
        number = len(_shapes(terms, rows, n))
        few = _few_chunks(tile_m, n, number)
        # A single sum takes so few registers that only the writing needs rounds.
        write_tile(rows, finish_sums(sum_tile(rows, unrolled=few if number > 1 else None)), few)
        return

    def begin(i, carry):
        return sum_tile(tile(i)), finish_sums(carry[0])

    def go_on(i, carry):
        sums, factors = carry
        return sum_tile(tile(i + 2), beside=write_columns(tile(i), factors)), finish_sums(sums)

    def end(i, carry):
        sums, factors = carry
        write_tile(tile(count - 2 + i), factors)
        return sums, finish_sums(sums)

    # What round 0 finishes is never used. It starts from loaded values: the compiler can't give a constant this layout.
    loaded = terms(pl.ds(0, tile_m), pl.ds(0, min(n, LANES)))
    sums = tuple(_in_lanes(term) for term in loaded)
    carry = sums, sums[:1] * len(jax.eval_shape(finish_sums, sums))
    carry = jax.lax.fori_loop(0, 2, begin, carry)
    carry = jax.lax.fori_loop(0, count - 2, go_on, carry)
    jax.lax.fori_loop(0, 2, end, carry)


def _few_chunks(tile_m: int, n: int, number: int) -> int:
    """Chunks per round for `number` sums of a tile that is alone."""
    most = FEW_REGISTERS // (pl.cdiv(tile_m, 8) * CHUNK // LANES)
    if number > 1:
        most = min(most, n // CHUNK // number)
    elif tile_m == 1:
        most *= 2  # the weight is not spread over rows
    return max(1, most)


def _shapes(terms, rows, n: int):
    return jax.eval_shape(lambda: terms(rows, pl.ds(0, min(n, LANES))))


def for_chunks(n: int, step, unrolled: int | None = None) -> None:
    """`step(cols)` over slices that cover n columns."""
    fold_chunks(n, lambda cols, carry: step(cols), None, unrolled)


def fold_chunks(n: int, step, carry, unrolled: int | None = None):
    """`carry = step(cols, carry)` over slices that cover n columns: CHUNK wide, then whole registers, then the rest.

    More than `unrolled` chunks are walked by a loop, so many a round.
    """
    unrolled = unrolled or UNROLLED_CHUNKS
    width = CHUNK * unrolled
    rounds = n // width if n >= 2 * width else 0

    def walk(i, carry):
        for index in range(unrolled):
            carry = step(pl.ds(pl.multiple_of(i * width + index * CHUNK, CHUNK), CHUNK), carry)
        return carry

    if rounds:
        carry = jax.lax.fori_loop(0, rounds, walk, carry)
    start = rounds * width
    while start < n:
        left = min(CHUNK, n - start)
        size = left // LANES * LANES or left
        carry = step(pl.ds(start, size), carry)
        start += size
    return carry


def sum_lanes(block):
    """(rows, columns) -> (rows, LANES): registers are added to registers, lanes stay apart. LANES divides columns."""
    return sum(block[:, start : start + LANES] for start in range(0, block.shape[1], LANES))


def _sum_columns(tile_m: int, n: int, terms, beside, unrolled: int | None):
    """Sum each array of `terms(cols)` over columns, lanes apart -> (tile_m, LANES); call `beside(cols)` on the way."""

    def add(cols, sums):
        if beside is not None:
            beside(cols)
        return tuple(total + _in_lanes(term) for total, term in zip(sums, terms(cols), strict=True))

    number = len(jax.eval_shape(lambda: terms(pl.ds(0, min(n, LANES)))))
    return fold_chunks(n, add, (jnp.zeros((tile_m, LANES), jnp.float32),) * number, unrolled)


def _in_lanes(block):
    """(rows, columns) -> (rows, LANES), of any width."""
    columns = block.shape[1]
    return jnp.pad(block, ((0, 0), (0, LANES - columns))) if columns < LANES else sum_lanes(block)


def _widen(lanes, columns: int):
    """(rows, LANES), all lanes equal -> (rows, columns)."""
    return lanes[:, :columns] if columns < LANES else jnp.concatenate([lanes] * (columns // LANES), axis=1)
