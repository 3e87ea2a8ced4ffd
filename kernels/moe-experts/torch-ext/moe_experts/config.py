"""Which variant runs, and its block sizes: pure functions of the sizes, the item size and the VMEM limit."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
LANES = 128
DEFAULT_VMEM_LIMIT_BYTES = 48 * MIB
DECODE_TOKENS = 256  # up to here computing every token (all but) hides behind reading the weights
SHORT_BLOCK_BYTES, LONG_BLOCK_BYTES = 2 * MIB, 4 * MIB


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
    vmem_limit_bytes: int = DEFAULT_VMEM_LIMIT_BYTES


def choose(sizes: Sizes, item: int, vmem_limit_bytes: int = DEFAULT_VMEM_LIMIT_BYTES) -> DecodeConfig | None:
    """How to decode these sizes with `item` bytes per weight; None where the plain products should run instead."""
    if sizes.t > DECODE_TOKENS or sizes.i == 0:
        return None
    # The first block is read while nothing else runs: with few visits it should be small.
    visits = min(sizes.e, sizes.t * sizes.top_k)
    wanted = SHORT_BLOCK_BYTES if visits <= 16 else LONG_BLOCK_BYTES
    fitting = [
        config
        for config in (DecodeConfig(block_h, vmem_limit_bytes=vmem_limit_bytes) for block_h in _blocks(sizes.h))
        if decode_vmem_bytes(config, sizes, item) * 5 <= vmem_limit_bytes * 4
    ]
    small = [config for config in fitting if sizes.w * config.block_h * item <= wanted]
    # Blocks grow with block_h: the largest that is small enough, else the smallest that fits.
    return max(small, key=_block_h) if small else min(fitting, key=_block_h, default=None)


def decode_vmem_bytes(config: DecodeConfig, sizes: Sizes, item: int) -> int:
    """Blocks of both weights, tokens and result twice; the first product, what is gated and the sums once."""
    t, h, w, i = sizes.t, sizes.h, sizes.w, sizes.i
    rows = -(-t // 16) * 16
    w, i, block_h, h = (-(-size // LANES) * LANES for size in (w, i, config.block_h, h))
    return 2 * (w + i) * block_h * item + 2 * 2 * rows * h * item + rows * (4 * w + item * i + 4 * h)


def _blocks(h: int) -> list[int]:
    """Divisors of h in whole registers of lanes, and h itself."""
    return [block for block in range(LANES, h, LANES) if h % block == 0] + [h]


def _block_h(config: DecodeConfig) -> int:
    return config.block_h
