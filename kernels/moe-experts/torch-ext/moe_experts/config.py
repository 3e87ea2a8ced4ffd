"""Which variant runs, and its block sizes: pure functions of the sizes, the item size and the TPU generation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .stored import ALL, SQUARE, Stored

MIB = 1024 * 1024
LANES = 128
DECODE_VMEM_LIMIT_BYTES = 48 * MIB
FEW_ROWS = 16  # a product's rows that cost no more than one
DECODE_TOKENS = 256  # up to here computing every token (all but) hides behind reading the weights
SHORT_BLOCK_BYTES, LONG_BLOCK_BYTES = 2 * MIB, 4 * MIB
# Of quantised weights a block has as many numbers as one of twice the bytes: a step's bundles depend on those. And the
# columns of a product are computed in as few parts as can be: at the end of each, the matrix units run dry.
QUANTIZED_CHUNK, QUANTIZED_PREFILL_CHUNK = 2048, 1024
# A prefill keeps its tokens in VMEM: 128 MiB on v5e and v6e, 64 MiB on v5p and 7x, some of it the compiler's.
PREFILL_VMEM_LIMIT_BYTES = {"TPU v5 lite": 112 * MIB, "TPU v6 lite": 112 * MIB}
SMALL_PREFILL_VMEM_LIMIT_BYTES = 56 * MIB
PREFILL_SLOTS = 2**16 - 1  # a slot's number takes 16 bits when slots are sorted
LARGEST_BLOCK_M = 512


@dataclass(frozen=True)
class Sizes:
    """One layer: x (t, h), gate_up (e, w, h), down (e, h, i); the last two axes exchanged when transposed."""

    t: int
    h: int
    w: int
    i: int
    e: int
    top_k: int
    transposed: bool
    stored: tuple[Stored, ...] = ()  # gate_up and down, when they are quantised


@dataclass(frozen=True)
class DecodeConfig:
    block_h: int  # divides h; a multiple of 128, or h itself
    chunk: int = 512  # columns of a product computed at once; only the compiler's schedule depends on it
    vmem_limit_bytes: int = DECODE_VMEM_LIMIT_BYTES


@dataclass(frozen=True)
class PrefillConfig:
    tokens: int  # per call; more tokens are several calls
    block_m: int  # slots per visit, a multiple of 16
    chunk: int = 512
    gate_chunk: int = 256  # the same for what is gated
    split: bool = False  # two kernels: VMEM holds the tokens, then their sums, not both at once
    vmem_limit_bytes: int = SMALL_PREFILL_VMEM_LIMIT_BYTES


@dataclass(frozen=True)
class ProductsConfig:
    """Two ragged dots, which choose their own blocks."""


Config = DecodeConfig | PrefillConfig | ProductsConfig


def choose(sizes: Sizes, item: int, device_kind: str | None = None) -> Config:
    """How to run these sizes with `item` bytes per number that is not quantised."""
    if sizes.i == 0 or (sizes.stored and not _in_whole_registers(sizes)):
        return ProductsConfig()
    if sizes.t > DECODE_TOKENS or (sizes.t > FEW_ROWS and _scaled_by_rows(sizes)):
        config = choose_prefill(sizes, item, device_kind)
        if config or sizes.t > DECODE_TOKENS:
            return config or ProductsConfig()
    config = choose_decode(sizes, item)
    if sizes.stored and config is None:  # whose other way takes far longer: as much memory as there is
        config = choose_decode(sizes, item, _vmem_limit(device_kind))
    return config or ProductsConfig()


def _in_whole_registers(sizes: Sizes) -> bool:
    """Whether quantised blocks are: 64 rows of half a byte, 32 of a byte."""
    return sizes.transposed and sizes.h % 64 == 0 and sizes.i % 64 == 0


def _scaled_by_rows(sizes: Sizes) -> bool:
    """Whether products have to be scaled before they are complete: of tokens that an expert does not serve too."""
    return any(stored.rows != ALL for stored in sizes.stored)


def choose_decode(sizes: Sizes, item: int, vmem_limit_bytes: int = DECODE_VMEM_LIMIT_BYTES) -> DecodeConfig | None:
    # The first block is read while nothing else runs: with few visits it should be small. More tokens need longer
    # blocks, since a step takes some hundred bundles whatever its length.
    wanted = SHORT_BLOCK_BYTES if sizes.t * sizes.top_k <= 16 else LONG_BLOCK_BYTES
    options = {"vmem_limit_bytes": vmem_limit_bytes}
    if sizes.stored:
        wanted, options["chunk"] = 2 * wanted, QUANTIZED_CHUNK
    fitting = [
        config
        for config in (DecodeConfig(block_h, **options) for block_h in blocks_of(sizes.h))
        if decode_vmem_bytes(config, sizes, item) * 5 <= vmem_limit_bytes * 4
    ]
    small = [config for config in fitting if sizes.w * config.block_h * item <= wanted]
    # Blocks grow with block_h: the largest that is small enough, else the smallest that fits.
    return max(small, key=_block_h) if small else min(fitting, key=_block_h, default=None)


def choose_prefill(sizes: Sizes, item: int, device_kind: str | None = None) -> PrefillConfig | None:
    """Calls of equal size, as few as VMEM allows: each reads the weights again.

    They pay while that takes less time than the rows' own copies through HBM would, and computing them.
    """
    if sizes.h % (LANES * 4 // item) or sizes.i % 8 or sizes.e >= 2**15:  # a word holds an expert and a slot
        return None
    limit = _vmem_limit(device_kind)
    calls = max(1, -(-sizes.t * sizes.top_k // PREFILL_SLOTS))
    while (tokens := -(-sizes.t // calls)) > DECODE_TOKENS or calls == 1:
        block_m = _rows_per_expert(tokens * sizes.top_k, sizes.e, multiple=16 if sizes.stored else 32)
        config = PrefillConfig(tokens, block_m, vmem_limit_bytes=limit)
        if sizes.stored and block_m <= 2 * FEW_ROWS:
            config = replace(config, chunk=QUANTIZED_PREFILL_CHUNK, gate_chunk=QUANTIZED_PREFILL_CHUNK)
        for fitting in (config, replace(config, split=True)):
            if prefill_vmem_bytes(fitting, sizes, item) <= limit - 2 * MIB:
                return fitting if calls == 1 or _worth_reading_again(fitting, sizes) else None
        calls += 1
    return None


def _vmem_limit(device_kind: str | None) -> int:
    return PREFILL_VMEM_LIMIT_BYTES.get(device_kind or "", SMALL_PREFILL_VMEM_LIMIT_BYTES)


def _rows_per_expert(slots: int, experts: int, multiple: int) -> int:
    """Rows that nearly every expert stays below when a router spreads its slots evenly: mean and two deviations."""
    mean = slots / experts
    return min(LARGEST_BLOCK_M, -int(-(mean + 2 * mean**0.5) // multiple) * multiple)


def _worth_reading_again(config: PrefillConfig, sizes: Sizes) -> bool:
    """Whether an expert's rows in one call are many enough to keep the matrix units busy while its weights are read."""
    return config.tokens * sizes.top_k >= 64 * sizes.e


def decode_vmem_bytes(config: DecodeConfig, sizes: Sizes, item: int) -> int:
    """Blocks of both weights, tokens and result twice; the first product, what is gated and the sums once."""
    t, h, w, i = sizes.t, sizes.h, sizes.w, sizes.i
    rows, weights = _up(t, 16), sum(weights_bytes(sizes, config.block_h, item))
    w, i, h = (_up(size, LANES) for size in (w, i, h))
    return weights + 2 * 2 * rows * h * item + rows * (4 * w + item * i + 4 * h)


def prefill_vmem_bytes(config: PrefillConfig, sizes: Sizes, item: int) -> int:
    """Words and sums of all tokens once, the weights of an expert twice, rows in all their forms and chunks.

    Of two kernels the larger one. A product of float32 is made of three bfloat16 parts of its rows and of its chunk of
    the weights.
    """
    h, w, i, m = sizes.h, _up(sizes.w, LANES), _up(sizes.i, LANES), config.block_m
    words, sums = _up(h * item // 4 // LANES, 8) * LANES * 4, _up(h // LANES, 8) * LANES * 4  # bytes of a row
    gate_up, down = weights_bytes(sizes, h, item)
    parts = 3 * 2 * (m + config.chunk) * max(h, i) if item == 4 else 0
    working = 2 * m * max(config.chunk, w) * 4 + parts
    first = config.tokens * words + gate_up + m * (words + h * item)
    second = config.tokens * sums + down + m * sums
    if config.split:  # what is gated leaves the first kernel, and comes into the second, in two buffers
        return max(first, second) + 2 * m * i * item + working
    return first + second + m * i * item + working


def weights_bytes(sizes: Sizes, block_h: int, item: int) -> tuple[int, int]:
    """A block of h of an expert's gate_up, and of down, twice; of quantised ones all scales too."""
    h, w, i = (_up(size, LANES) for size in (block_h, sizes.w, sizes.i))
    if not sizes.stored:
        return 2 * w * h * item, 2 * i * h * item
    totals = []
    for stored, rows, columns, of in zip(
        sizes.stored, (h, i), (w, h), ((sizes.h, sizes.w), (sizes.i, sizes.h)), strict=True
    ):
        a, b = stored.scale_shape(*of)
        total = 2 * rows * columns * stored.bits // 8 + 2 * _up(a, 8) * _up(b, LANES) * 4
        totals.append(total + (_up(a, 8) * _up(of[1], LANES) * 4 if stored.columns == SQUARE else 0))
    return totals[0], totals[1]


def blocks_of(h: int) -> list[int]:
    """Divisors of h in whole registers of lanes, and h itself."""
    return [block for block in range(LANES, h, LANES) if h % block == 0] + [h]


def _block_h(config: DecodeConfig) -> int:
    return config.block_h


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
