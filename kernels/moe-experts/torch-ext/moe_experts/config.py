"""Which variant runs, and its block sizes: pure functions of the sizes, the item size and the TPU generation."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
LANES = 128
DECODE_VMEM_LIMIT_BYTES = 48 * MIB
DECODE_TOKENS = 256  # up to here computing every token (all but) hides behind reading the weights
SHORT_BLOCK_BYTES, LONG_BLOCK_BYTES = 2 * MIB, 4 * MIB
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


@dataclass(frozen=True)
class DecodeConfig:
    block_h: int  # divides h; a multiple of 128, or h itself
    chunk: int = 512  # columns of a product computed at once; only the compiler's schedule depends on it
    vmem_limit_bytes: int = DECODE_VMEM_LIMIT_BYTES


@dataclass(frozen=True)
class PrefillConfig:
    tokens: int  # per call; more tokens are several calls
    block_m: int  # slots per visit, a multiple of 32
    chunk: int = 512
    vmem_limit_bytes: int = SMALL_PREFILL_VMEM_LIMIT_BYTES


@dataclass(frozen=True)
class ProductsConfig:
    """Two ragged dots, which choose their own blocks."""


Config = DecodeConfig | PrefillConfig | ProductsConfig


def choose(sizes: Sizes, item: int, device_kind: str | None = None) -> Config:
    """How to run these sizes with `item` bytes per weight."""
    if sizes.i == 0:
        return ProductsConfig()
    if sizes.t <= DECODE_TOKENS:
        return choose_decode(sizes, item) or ProductsConfig()
    return choose_prefill(sizes, item, device_kind) or ProductsConfig()


def choose_decode(sizes: Sizes, item: int, vmem_limit_bytes: int = DECODE_VMEM_LIMIT_BYTES) -> DecodeConfig | None:
    # The first block is read while nothing else runs: with few visits it should be small. More tokens need longer
    # blocks, since a step takes some hundred bundles whatever its length.
    wanted = SHORT_BLOCK_BYTES if sizes.t * sizes.top_k <= 16 else LONG_BLOCK_BYTES
    fitting = [
        config
        for config in (DecodeConfig(block_h, vmem_limit_bytes=vmem_limit_bytes) for block_h in blocks_of(sizes.h))
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
    limit = PREFILL_VMEM_LIMIT_BYTES.get(device_kind or "", SMALL_PREFILL_VMEM_LIMIT_BYTES)
    calls = max(1, -(-sizes.t * sizes.top_k // PREFILL_SLOTS))
    while (tokens := -(-sizes.t // calls)) > DECODE_TOKENS:
        config = PrefillConfig(tokens, _rows_per_expert(tokens * sizes.top_k, sizes.e), vmem_limit_bytes=limit)
        if prefill_vmem_bytes(config, sizes, item) <= limit - 2 * MIB:
            return config if calls == 1 or _worth_reading_again(config, sizes) else None
        calls += 1
    return None


def _rows_per_expert(slots: int, experts: int) -> int:
    """Rows that nearly every expert stays below when a router spreads its slots evenly: mean and two deviations."""
    mean = slots / experts
    return min(LARGEST_BLOCK_M, -int(-(mean + 2 * mean**0.5) // 32) * 32)


def _worth_reading_again(config: PrefillConfig, sizes: Sizes) -> bool:
    """Whether an expert's rows in one call are many enough to keep the matrix units busy while its weights are read."""
    return config.tokens * sizes.top_k >= 64 * sizes.e


def decode_vmem_bytes(config: DecodeConfig, sizes: Sizes, item: int) -> int:
    """Blocks of both weights, tokens and result twice; the first product, what is gated and the sums once."""
    t, h, w, i = sizes.t, sizes.h, sizes.w, sizes.i
    rows = _up(t, 16)
    w, i, block_h, h = (_up(size, LANES) for size in (w, i, config.block_h, h))
    return 2 * (w + i) * block_h * item + 2 * 2 * rows * h * item + rows * (4 * w + item * i + 4 * h)


def prefill_vmem_bytes(config: PrefillConfig, sizes: Sizes, item: int) -> int:
    """Words and sums of all tokens once, the weights of an expert twice, rows in all their forms and chunks.

    A product of float32 is made of three bfloat16 parts of its rows and of its chunk of the weights.
    """
    h, w, i, m = sizes.h, _up(sizes.w, LANES), _up(sizes.i, LANES), config.block_m
    words, sums = _up(h * item // 4 // LANES, 8) * LANES * 4, _up(h // LANES, 8) * LANES * 4  # bytes of a row
    weights = 2 * (w + i) * _up(h, LANES) * item
    rows = m * (words + sums + h * item + i * item)
    parts = 3 * 2 * (m + config.chunk) * max(h, i) if item == 4 else 0
    return config.tokens * (words + sums) + weights + rows + 2 * m * max(config.chunk, w) * 4 + parts


def blocks_of(h: int) -> list[int]:
    """Divisors of h in whole registers of lanes, and h itself."""
    return [block for block in range(LANES, h, LANES) if h % block == 0] + [h]


def _block_h(config: DecodeConfig) -> int:
    return config.block_h


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
