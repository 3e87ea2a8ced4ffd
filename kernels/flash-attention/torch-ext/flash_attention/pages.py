"""Keys in pages: which page holds what is in a table, (sequences, most pages)."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import INTS, can_read_values, shape_text


def gather_pages(op: str, pages: Tensor, block_table: Tensor, n: int, lengths: Tensor) -> Tensor:
    """(pages, page, hk, d) -> (n, most keys, hk, d): each sequence's pages in order, as many as the longest needs."""
    check_table(op, "block_table", block_table, n)
    check_pages(op, "block_table", block_table, lengths, *pages.shape[:2])
    if can_read_values(lengths) and n:
        longest = int(lengths.max())
        block_table = block_table[:, : -(-longest // max(pages.shape[1], 1))]
    # Places past the sequence's end may hold anything, -1 for instance.
    return pages[block_table.clamp(0, max(pages.shape[0] - 1, 0))].flatten(1, 2)


def check_table(op: str, name: str, table: object, n: int) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor; got {type(table).__name__}. Try torch.tensor({name}).")
    if table.dim() != 2 or table.shape[0] != n:
        raise ValueError(f"{op}: {name} must be (sequences, most pages) = ({n}, most pages); got {shape_text(table)}.")
    if table.dtype not in INTS:
        kind = str(table.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} is {kind}; supported: int32, int64. Try {name}.to(torch.int32).")


def check_pages(op: str, name: str, table: Tensor, lengths: Tensor, num_pages: int, page: int) -> None:
    """Of a checked table and lengths: room for them, and pages that there are. Where a look at values is free."""
    if not (can_read_values(lengths) and can_read_values(table)):
        return
    check_room(op, lengths, 0, table.shape[1] * page)
    if not table.numel():
        return
    used = torch.arange(table.shape[1], device=lengths.device) * page < lengths[:, None]
    wrong = used & ((table < 0) | (table >= num_pages))
    if bool(wrong.any()):
        n, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{op}: {name} must name pages 0 ... num_pages - 1 = {num_pages - 1} as far as a sequence reaches; "
            f"got {int(table[n, place])} in {name}[{n}, {place}]."
        )


def check_room(op: str, lengths: Tensor, new: int, capacity: int) -> None:
    for i, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity - new:
            more = f" and {new} to append" if new else ""
            raise ValueError(
                f"{op}: every sequence must have 0 ... {capacity} keys, the room in the cache; "
                f"got {length}{more} in sequence {i}."
            )
