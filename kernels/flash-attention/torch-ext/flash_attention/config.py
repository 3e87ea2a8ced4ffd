"""Block sizes of the attention kernels: pure functions of the sizes and the item size."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
DEFAULT_VMEM_LIMIT_BYTES = 48 * MIB
LANES = 128


@dataclass(frozen=True)
class Config:
    """Block sizes of one launch; blocks may hang over the end of rows and keys. The compiler gets the limit."""

    block_q: int  # rows of queries per visit, of each head: a multiple of 128
    block_k: int  # keys per visit: a multiple of 128
    chunk: int = 128  # rows of one head that pass through the stages together; divides block_q
    vmem_limit_bytes: int = DEFAULT_VMEM_LIMIT_BYTES


def choose_config(
    lq: int, lk: int, group: int, d: int, dv: int, dtype_bytes: int, bias_heads: int = 0, plain: bool = True
) -> Config:
    """Of the forward kernel. 512 rows of a head at a time keep the matrix units busy while results are on their way.

    `bias_heads`: how many heads of bias a visit reads, 0 without one. Not `plain`, with a bias, slopes or a
    softcap, a score takes many instructions, and long stretches of them would compile for minutes.
    """
    return _largest(forward_vmem_bytes, 512, lq, lk, group, d, dv, dtype_bytes, bias_heads, plain)


def choose_backward_config(
    lq: int, lk: int, group: int, d: int, dv: int, dtype_bytes: int, bias_heads: int = 0, plain: bool = True
) -> Config:
    """Of the backward kernel."""
    return _largest(backward_vmem_bytes, 512, lq, lk, group, d, dv, dtype_bytes, bias_heads, plain)


def forward_vmem_bytes(
    config: Config, lq: int, group: int, d: int, dv: int, dtype_bytes: int, bias_heads: int = 0
) -> int:
    """Blocks twice, sums of the group, two chunks of scores and what the compiler holds of a third, the mask."""
    q, k, chunk = config.block_q, config.block_k, config.chunk
    rows = group * q * (2 * (_lanes(d) + _lanes(dv)) * dtype_bytes + (dv + 16 + 8) * 4 + 2 * 8 * 4)
    keys = k * (2 * _lanes(d) + 3 * (dv + 16)) * dtype_bytes
    return rows + keys + 4 * k * chunk * 4 + q * k * 4 + 2 * bias_heads * q * k * 4


def backward_vmem_bytes(
    config: Config, lq: int, group: int, d: int, dv: int, dtype_bytes: int, bias_heads: int = 0
) -> int:
    """Also dq of a span of rows, the sums of dk and dv, and with a bias the gradient of all scores of a visit."""
    q, k, chunk = config.block_q, config.block_k, config.chunk
    span = min(-(-lq // q) * q, max(q, rows_per_span(group, d) // q * q))
    rows = group * (q * 2 * ((d + dv) * dtype_bytes + _lanes(d) * 4 + 2 * 8 * 4) + span * d * 4)
    keys = k * (2 * (2 * _lanes(d) + _lanes(dv)) * dtype_bytes + (2 * (_lanes(d) + _lanes(dv)) + d + dv) * 4)
    scores = 8 * k * chunk * 4 + q * k * 4
    return rows + keys + scores + 2 * (bias_heads + (group if bias_heads else 0)) * q * k * 4


def rows_per_span(group: int, d: int) -> int:
    """Rows of each head whose float32 gradients the backward kernel may keep."""
    return 16 * MIB // (4 * group * -(-d // 8) * 8)


def _largest(needed, most, lq, lk, group, d, dv, dtype_bytes, bias_heads, plain) -> Config:
    """Square blocks first, then fewer rows: what does not fit is sized by rows times heads."""
    block_q, block_k = _block(lq, most), _block(lk, most)
    while True:
        config = Config(block_q, block_k, block_q if plain else LANES)
        fits = needed(config, lq, group, d, dv, dtype_bytes, bias_heads) * 5 <= config.vmem_limit_bytes * 4
        if fits or block_q == block_k == LANES:
            return config
        block_q, block_k = (block_q // 2, block_k) if block_q >= block_k else (block_q, block_k // 2)


def _block(size: int, most: int) -> int:
    """A power of two between 128 and `most`."""
    block = most
    while block > LANES and block // 2 >= size:
        block //= 2
    return block


def _lanes(size: int) -> int:
    return -(-size // LANES) * LANES
