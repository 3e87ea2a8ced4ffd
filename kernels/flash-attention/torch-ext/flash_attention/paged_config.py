"""Block sizes of paged attention: pure functions of the sizes and the item size.

A visit is one tile of queries over one block of pages. Its copies have to be long against the time they take to start,
its scores should stay in registers, and a sequence's last block is computed whole however few of its keys there are.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
LANES = 128
VMEM_LIMIT_BYTES = 32 * MIB
BLOCK_BYTES = MIB  # keys and values of one visit: 512 tokens of 4 heads of 128 in bfloat16
MOST_SCORES = 32 * 1024  # of all heads in a visit of one query: half of the vector registers
MOST_ROWS = 256  # queries times heads in a product
MOST_QUERIES = 32
SCALAR_BYTES = 512 * 1024  # of scalar memory, for tables


@dataclass(frozen=True)
class PagedSizes:
    """q (.., hq, d), pages of page_size keys (hk, d) and values (hk, dv)."""

    hq: int
    hk: int
    d: int
    dv: int
    page_size: int
    item: int  # bytes of an element
    apart: bool = False  # whether heads that share words are taken apart, which pays for many queries

    @property
    def pack(self) -> int:
        """Rows of a 32-bit word."""
        return 4 // self.item

    @property
    def in_words(self) -> bool:
        """Whether the rows of two heads share words, and can be read without those of others."""
        return self.d == LANES and self.dv == LANES and self.hk % self.pack == 0

    @property
    def heads(self) -> int:
        """Key heads that are multiplied together, as they lie in memory: a set. See paged.py."""
        if not self.in_words:
            return self.hk
        return 1 if self.apart else self.pack

    @property
    def sets(self) -> int:
        return self.hk // self.heads

    @property
    def group(self) -> int:
        return self.hq // self.hk

    @property
    def page_rows(self) -> int:
        """Keys of all heads in a page, one under the other."""
        return self.page_size * self.hk

    def rows(self, block_q: int) -> int:
        """Queries of a set in a tile, filled up to whole registers."""
        return _up(block_q * self.heads * self.group, 8 * self.pack)


@dataclass(frozen=True)
class PagedConfig:
    block_q: int  # queries per tile
    block_pages: int  # pages per visit
    chunk: int  # keys of a set multiplied at once, divides block_pages * page_size * heads
    vmem_limit_bytes: int = VMEM_LIMIT_BYTES


def choose_paged(sizes: PagedSizes, block_q: int, most_pages: int, device_kind: str | None = None) -> PagedConfig:
    """Blocks for tiles of `block_q` queries over page tables of `most_pages` pages.

    Raises   ValueError: a page's rows do not fill whole registers, or do not fit in VMEM.
    """
    rows, step = sizes.page_rows, 8 * sizes.pack
    if rows % step:
        raise ValueError(
            f"paged_attention: page_size * heads must be a multiple of {step} for pages of {sizes.item}-byte items; "
            f"got {sizes.page_size} * {sizes.hk} = {rows}. Use pages of a multiple of {step} tokens."
        )
    lanes = _up(sizes.d, LANES) + _up(sizes.dv, LANES)
    wanted = max(1, BLOCK_BYTES // (rows * lanes * sizes.item))
    if block_q == 1:
        scores = sizes.page_size * sizes.heads * sizes.sets * sizes.rows(1)
        wanted = max(1, min(wanted, MOST_SCORES // scores))
    pages = max(1, min(wanted, most_pages))
    pages = 1 << (pages.bit_length() - 1)  # partial blocks are copied in powers of two
    while pages:
        config = PagedConfig(block_q, pages, _chunk(sizes, pages, block_q, device_kind))
        if paged_vmem_bytes(config, sizes) * 5 <= config.vmem_limit_bytes * 4:
            return config
        pages //= 2
    raise ValueError(
        f"paged_attention: a page must fit in VMEM some four times; got page_size = {sizes.page_size} with "
        f"{sizes.hk} heads of {sizes.d} and {sizes.dv}. Use smaller pages."
    )


def choose_block_q(sizes: PagedSizes, total_q: int, sequences: int) -> int:
    """Queries per tile: about as many as a sequence has, in whole tiles of registers."""
    most = max(1, min(MOST_QUERIES, MOST_ROWS // (sizes.heads * sizes.group)))
    block_q = 1
    while block_q < most and block_q * sequences < total_q:
        block_q *= 2
    return block_q


def paged_vmem_bytes(config: PagedConfig, sizes: PagedSizes) -> int:
    """Keys and values three times; queries, results, sums; scores and weights of a chunk."""
    d, dv, rows = _up(sizes.d, LANES), _up(sizes.dv, LANES), sizes.rows(config.block_q)
    columns = config.block_pages * sizes.page_size * sizes.heads
    pages = 3 * config.block_pages * sizes.page_rows * (d + dv) * sizes.item
    tiles = sizes.sets * rows * (2 * (d + dv) * sizes.item + 4 * (dv + 2 * LANES))
    parts = 3 * config.chunk * (d + dv) * sizes.item if sizes.item == 4 else 0
    return pages + tiles + sizes.sets * rows * columns * 4 + 3 * rows * config.chunk * 4 + parts


def _chunk(sizes: PagedSizes, pages: int, block_q: int, device_kind: str | None) -> int:
    """The width of a matrix unit, 128 on v5e and v5p and else 256; of scores of many rows 128 leave more registers."""
    columns = pages * sizes.page_size * sizes.heads
    widths = (128,) if block_q > 1 or device_kind in ("TPU v5 lite", "TPU v5") else (256, 128)
    return next((chunk for chunk in widths if columns % chunk == 0), columns)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
