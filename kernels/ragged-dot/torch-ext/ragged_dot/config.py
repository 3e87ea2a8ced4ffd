"""Block sizes of the two kernels: pure functions of the sizes, the item size and the VMEM limit.

The pipeline holds every block twice, and the compiler keeps the float32 product in VMEM. A choice is taken only when
all of that, and a quarter more for what the compiler adds, stays under the limit. The default limit suits every
generation the kernels compile for: a core has 128 MiB of VMEM on v5e and v6e, 64 MiB on v5p and 7x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

MIB = 1024 * 1024
DEFAULT_VMEM_LIMIT_BYTES = 48 * MIB
LANES = 128  # the last axis of a block is a multiple of this, or whole
MIN_BLOCK_N = 256  # a narrower block reads the weights in short runs
DECODE_BLOCK_BYTES = 2 * MIB  # the first weight block is read while nothing else runs, so it should be small


@dataclass(frozen=True)
class Config:
    """Block sizes of one launch; blocks may hang over the end of any axis. `vmem_limit_bytes` goes to the compiler."""

    block_m: int  # rows per tile: a multiple of 16, at most 16384
    block_k: int
    block_n: int
    vmem_limit_bytes: int = DEFAULT_VMEM_LIMIT_BYTES
    chunk: int = 256  # columns of a block multiplied at once; only the compiler's schedule depends on it


def choose_config(
    m: int,
    k: int,
    n: int,
    g: int,
    dtype_bytes: int,
    vmem_limit_bytes: int = DEFAULT_VMEM_LIMIT_BYTES,
    device_kind: str | None = None,
    transposed: bool = False,
) -> Config:
    """Blocks for (m, k) @ (g, k, n), or (g, n, k) transposed: k whole where it fits, so that weights are read once.

    Splitting n re-reads lhs once per split (unless it is one tile), so n is whole for many rows; for few rows lhs is
    cheap next to the weights, and smaller blocks start the pipeline sooner.
    Raises   ValueError: not even the smallest blocks fit the limit.
    """
    for block_m in _row_blocks(m, g):
        for block_k in _splits(k):
            for block_n in _splits(n):
                config = Config(block_m, block_k, block_n, vmem_limit_bytes, _chunk(block_m, device_kind, transposed))
                if block_n < min(n, MIN_BLOCK_N) and block_k > LANES:
                    break
                if _fits(forward_vmem_bytes(config, dtype_bytes), config):
                    return _shrink_for_decode(config, m, n, g, dtype_bytes)
    raise _nothing_fits(m, k, n, dtype_bytes, vmem_limit_bytes)


def choose_weight_gradient_config(
    m: int, k: int, n: int, g: int, dtype_bytes: int, vmem_limit_bytes: int = DEFAULT_VMEM_LIMIT_BYTES
) -> Config:
    """Blocks for the (g, k, n) weight gradient: those that re-read lhs and grad least often.

    Rows are what the product sums over, so a tile of a large group has at least as many as a matrix unit is deep, 256.
    Raises   ValueError: not even the smallest blocks fit the limit.
    """
    for block_m in _row_blocks(m, g, most=256):
        best: tuple[int, Config] | None = None
        for block_k in _splits(k):
            for block_n in _splits(n):
                config = Config(block_m, block_k, block_n, vmem_limit_bytes)
                if not _fits(weight_gradient_vmem_bytes(config, dtype_bytes), config):
                    continue
                columns_read = k * -(-n // block_n) + n * -(-k // block_k)  # per row, of lhs and grad
                if best is None or columns_read < best[0]:
                    best = columns_read, config
                break  # smaller block_n with this block_k only reads more
        if best is not None:
            return best[1]
    raise _nothing_fits(m, k, n, dtype_bytes, vmem_limit_bytes)


def forward_vmem_bytes(config: Config, dtype_bytes: int) -> int:
    """lhs, rhs and out blocks twice, a float32 product and a float32 accumulator."""
    m, k, n = _padded(config)
    return 2 * (m * k + k * n + m * n) * dtype_bytes + 2 * m * n * 4


def weight_gradient_vmem_bytes(config: Config, dtype_bytes: int) -> int:
    """lhs, grad and out blocks twice, copies of lhs (transposed) and grad, a float32 accumulator and product chunks."""
    m, k, n = _padded(config)
    copies = (max(m, LANES) * k + m * n) * dtype_bytes
    return 2 * (m * k + m * n + k * n) * dtype_bytes + copies + (k + 2 * config.chunk) * n * 4


def _chunk(block_m: int, device_kind: str | None, transposed: bool) -> int:
    """Columns of weights to multiply at once. Half a matrix unit of v6e or 7x, 128, leaves the compiler registers.

    Compiled at the sizes of Qwen3-30B-A3B in bfloat16. Few rows: 128 does without spills, and stored as (g, n, k) it
    also takes 10 to 20 % fewer bundles on v6e and 7x. 128 rows: v5e and v5p take 2 to 8 % fewer bundles for the whole
    block, though they spill; v6e a quarter fewer for 256; 7x does not spill with 256, or 128 for (g, n, k).
    """
    few_rows = block_m < 128
    if device_kind in ("TPU v5 lite", "TPU v5"):
        return LANES if few_rows else 2**30
    return LANES if transposed and (few_rows or device_kind != "TPU v6 lite") else 256


def _row_blocks(m: int, g: int, most: int = 128) -> Iterator[int]:
    """Rows per tile, best first. A tile that is long against the groups computes rows of other groups for nothing."""
    rows_per_group = -(-m // max(1, min(m, g)))
    best = most if rows_per_group <= 4 * most else 2 * most if rows_per_group <= 16 * most else 512
    while best > 16 and best >= 16 * rows_per_group:
        best //= 2
    rows = -(-m // 16) * 16
    while best >= 16:
        if best <= max(rows, 16) or best == 16:
            yield best
        elif best // 2 < rows:
            yield rows
        best //= 2


def _splits(size: int) -> Iterator[int]:
    """The whole axis, then ever smaller multiples of the lane count, down to one; some dozens for any size."""
    yield size
    last, parts = size, 2
    while last > LANES:
        block = -(-size // (parts * LANES)) * LANES
        if block < last:
            yield block
            last = block
        parts += 1 + parts // 8


def _shrink_for_decode(config: Config, m: int, n: int, g: int, dtype_bytes: int) -> Config:
    """Narrow block_n towards DECODE_BLOCK_BYTES while re-reading lhs adds under 1 % to the bytes of the weights."""
    stays = m <= config.block_m  # a single row tile stays in VMEM from one block of columns to the next
    chosen = config.block_n
    for block_n in _splits(n):
        rereads = 0 if stays else -(-n // block_n) - 1
        if block_n < MIN_BLOCK_N or rereads * m * 100 > min(g, m) * n:
            break
        if block_n <= chosen:
            chosen = block_n
            if config.block_k * block_n * dtype_bytes <= DECODE_BLOCK_BYTES:
                break
    return replace(config, block_n=chosen)


def _padded(config: Config) -> tuple[int, int, int]:
    return config.block_m, -(-config.block_k // LANES) * LANES, -(-config.block_n // LANES) * LANES


def _fits(vmem_bytes: int, config: Config) -> bool:
    return vmem_bytes * 5 <= config.vmem_limit_bytes * 4


def _nothing_fits(m: int, k: int, n: int, dtype_bytes: int, vmem_limit_bytes: int) -> ValueError:
    return ValueError(
        f"ragged_dot: no blocks of (m, k, n) = ({m}, {k}, {n}) with {dtype_bytes}-byte items fit "
        f"vmem_limit_bytes = {vmem_limit_bytes}; the smallest need about 1 MiB. Raise vmem_limit_bytes."
    )
