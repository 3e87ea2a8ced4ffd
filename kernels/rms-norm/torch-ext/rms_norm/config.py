"""Block sizes: a pure function of shapes and dtypes, bounded by the memory a TPU core grants one kernel.

A step takes `block_m` whole rows where that fits. Rows too wide for it are cut into `block_n` columns, and the step
that has seen all columns of a row finds the row in scratch memory: x is read from HBM once either way.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
LANES = 128  # columns of one register; blocks are whole multiples, or the whole axis
DEFAULT_VMEM_BYTES = 16 * MIB  # v5e and v5p grant this to a kernel that does not ask; v6e and tpu7x grant twice as much
LARGEST_VMEM_BYTES = 48 * MIB  # what a kernel may ask for; tpu7x has 64 MiB, the other generations at least as much
BLOCK_BYTES = MIB  # aim for one block of x: a long DMA, yet short to wait for at the first and the last step
CUT_COLUMNS = 2048  # columns per step once a row does not fit
TWO_CORE_KINDS = ("TPU v4", "TPU v5", "TPU v5p")  # two cores share the memory of one such device
COPY_COLUMNS = (3072, 6144)  # fewer: sums end before lanes are added; more: more is unrolled than registers hold
SPARE_SHARE = 8  # 1/8 of the limit is left to the compiler


class NoConfig(ValueError):
    """No block of these rows fits the memory of a TPU core."""


@dataclass(frozen=True)
class Config:
    """How one launch cuts x (m, n)."""

    block_m: int  # rows per grid step
    block_n: int  # columns per grid step; n when rows stay whole
    tile_m: int  # rows worked on at a time; divides block_m
    vmem_limit_bytes: int = DEFAULT_VMEM_BYTES


@dataclass(frozen=True)
class Streams:
    """What a launch keeps in VMEM, in bytes per element of one row, apart from the weight."""

    blocks: tuple[int, ...]  # item size of each (m, n) operand and result: double-buffered
    row_scratch: tuple[int, ...] = ()  # item size of each block kept in scratch when rows are cut
    sums: bool = False  # float32 accumulators for dweight, next to the weight in float32
    copies: bool = False  # float32 copies of x and dy, made with the sums of a tile for when it is written
    cores: int = 1  # that sum dweight, each over its own steps
    tile_rows: int = 32  # rows worked on at a time: more need fewer rounds, fewer leave room for operands in registers


def forward_streams(x_bytes: int, y_bytes: int, *, residual: bool) -> Streams:
    """x and y, and with a residual that operand and the sum; a cut row waits in scratch in x's dtype."""
    extra = (x_bytes, x_bytes) if residual else ()
    return Streams(blocks=(x_bytes, y_bytes, *extra), row_scratch=(x_bytes,))


def backward_streams(x_bytes: int, y_bytes: int, *, residual: bool, device_kind: str | None = None) -> Streams:
    """x, dy and dx, and with a residual the gradient of the sum; a cut row keeps x and dy.

    TPU7x has the fastest memory beside its vector units, and stores twice a cycle: there, widening bfloat16 once pays.
    """
    extra = (x_bytes,) if residual else ()
    return Streams(
        blocks=(x_bytes, y_bytes, x_bytes, *extra),
        row_scratch=(x_bytes, y_bytes),
        sums=True,
        copies=device_kind == "TPU7x" and x_bytes == y_bytes == 2,
        cores=2 if device_kind in TWO_CORE_KINDS else 1,
        tile_rows=16,
    )


def makes_copies(config: Config, m: int, n: int, streams: Streams) -> bool:
    """Whether a launch with these blocks keeps float32 copies: not for a single step, whose time is that of latency."""
    return _copies_fit(n, streams) and config.block_m < m


def choose(m: int, n: int, streams: Streams, *, limits: tuple[int, ...] = ()) -> Config:
    """The blocks for x (m, n), m and n at least 1: whole rows under the smallest limit that takes them.

    Raises   NoConfig: not even cut rows fit the largest limit
    """
    limits = limits or (DEFAULT_VMEM_BYTES, 2 * DEFAULT_VMEM_BYTES, LARGEST_VMEM_BYTES)
    tile_m = _tile(m, streams)
    for limit in limits:
        block_m = _rows_that_fit(m, n, tile_m, streams, limit)
        if block_m:
            return Config(block_m, n, tile_m, limit)
    tile_m = min(m, 8)
    block_n = min(CUT_COLUMNS, _round_up(n, LANES))
    for limit in limits:
        cut = Config(tile_m, block_n, tile_m, limit)
        if vmem_bytes(cut, n, streams) <= _budget(limit):
            return cut
    need = vmem_bytes(Config(tile_m, block_n, tile_m), n, streams)
    raise NoConfig(
        f"rms_norm: rows of n = {n} need {need / MIB:.1f} MiB of TPU memory next to their weight; "
        f"a kernel may use {_budget(limits[-1]) / MIB:.1f} MiB. Split the last axis, or run on another device."
    )


def vmem_bytes(config: Config, n: int, streams: Streams) -> int:
    """Bytes of VMEM that `config` needs: blocks twice (one is computed, one in flight), scratch once."""
    width = _round_up(config.block_n, LANES)
    whole = config.block_n >= n
    blocks = sum(2 * _block_bytes(config.block_m, width, item) for item in streams.blocks)
    weights = 2 * 4 * 8 * width * (1 + streams.sums)  # (1, n) arrays fill 8 sublanes at worst
    row_width = _round_up(n, width)
    sums = 2 * streams.sums * _block_bytes(sum_rows(config.tile_m), row_width, 4)  # and the scale, of that shape
    copies = 2 * 4 * config.block_m * width if whole and _copies_fit(n, streams) else 0
    kept = 0 if whole else sum(_block_bytes(config.block_m, row_width, item) for item in streams.row_scratch)
    return blocks + weights + sums + copies + kept


def sum_rows(tile_m: int) -> int:
    """Rows of the dweight accumulator: one register high, so that adding to it never crosses sublanes."""
    return 8 if tile_m % 8 == 0 else tile_m


def _copies_fit(n: int, streams: Streams) -> bool:
    least, most = COPY_COLUMNS
    return streams.copies and least <= n <= most


def _rows_that_fit(m: int, n: int, tile_m: int, streams: Streams, limit: int) -> int:
    """Rows per step near BLOCK_BYTES of x, fewer where VMEM is short, 0 where not even one tile fits."""
    row_bytes = _round_up(n, LANES) * max(streams.blocks)
    tiles = max(1, min(BLOCK_BYTES // (row_bytes * tile_m), m // tile_m))
    while tiles and vmem_bytes(Config(tiles * tile_m, n, tile_m), n, streams) > _budget(limit):
        tiles -= 1
    # Up to half as many, if then no block is partial.
    even = next((some for some in range(tiles, tiles // 2, -1) if m % (some * tile_m) == 0), tiles)
    return even * tile_m


def _tile(m: int, streams: Streams) -> int:
    """Rows of one tile: whole registers of the narrowest dtype, so that no load straddles two of them."""
    register = 8 * 4 // min(streams.blocks)
    return m if m < register else min(m, streams.tile_rows) // register * register


def _block_bytes(rows: int, width: int, item: int) -> int:
    return _round_up(rows, 8 * 4 // item) * width * item


def _budget(limit: int) -> int:
    return limit - limit // SPARE_SHARE


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
