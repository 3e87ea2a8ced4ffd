"""Keys in pages: which page holds what is in a table, (sequences, most pages)."""

from __future__ import annotations

from torch import Tensor

from .checks import can_read_values, shape_text


def gather_pages(op: str, pages: Tensor, block_table: Tensor, n: int, lengths: Tensor) -> Tensor:
    """(pages, page, hk, d) -> (n, most keys, hk, d): each sequence's pages in order, as many as the longest needs."""
    check_table(op, block_table, n)
    if can_read_values(lengths) and n:
        longest = int(lengths.max())
        check_room(op, lengths, 0, block_table.shape[1] * pages.shape[1])
        block_table = block_table[:, : -(-longest // max(pages.shape[1], 1))]
    # Places past the sequence's end may hold anything, -1 for instance.
    return pages[block_table.clamp(0, max(pages.shape[0] - 1, 0))].flatten(1, 2)


def check_table(op: str, block_table: Tensor, n: int) -> None:
    if not isinstance(block_table, Tensor) or block_table.dim() != 2 or block_table.shape[0] != n:
        came = shape_text(block_table) if isinstance(block_table, Tensor) else type(block_table).__name__
        raise ValueError(f"{op}: block_table must be (sequences, most pages) = ({n}, most pages); got {came}.")


def check_room(op: str, lengths: Tensor, new: int, capacity: int) -> None:
    for i, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity - new:
            more = f" and {new} to append" if new else ""
            raise ValueError(
                f"{op}: every sequence must have 0 ... {capacity} keys, the room in the cache; "
                f"got {length}{more} in sequence {i}."
            )
