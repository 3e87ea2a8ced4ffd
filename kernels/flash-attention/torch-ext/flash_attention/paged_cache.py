"""A cache of keys and values in pages, for Transformers' generate().

It has the methods that Transformers asks of a Cache. What `update` returns are tensors of the usual shape that are
still in pages: the attention of this kernel reads them there, and any other operation gathers them first. So it works
with every attention implementation, and saves copies with this one.

Sequences may share pages. Beam search and repeated prompts only move entries of the page table; a page is copied when
one of several sequences in it goes on writing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .paged_op import attend_table

WHO = "PagedKVCache"


class PagedKVCache:
    """Pass a new one to `model.generate(..., past_key_values=PagedKVCache())`.

    page_size   tokens per page; page_size * heads must be a multiple of 16 on TPU
    num_pages   pages per layer; None: as many as needed. Memory is taken at once, or doubled when it is used up

    Raises   ValueError: more tokens than num_pages hold.  RuntimeError: keys that need a gradient
    """

    def __init__(self, page_size: int = 64, num_pages: int | None = None):
        for name, size in (("page_size", page_size), ("num_pages", num_pages)):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ValueError(f"{WHO}: {name} must be a whole number above 0; got {size}.")
        self.page_size, self.num_pages = page_size, num_pages
        self.layers: list[PagedLayer] = []

    # What a Cache of Transformers says about itself.
    is_compileable, is_croppable, offloading = False, True, False

    @property
    def is_sliding(self) -> list[bool]:
        """False: every key is kept, and a window is the attention's business."""
        return [False] * len(self.layers)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self.layers)

    @property
    def is_initialized(self) -> bool:
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def batch_size(self) -> int:
        return len(self.layers[0].rows) if self.is_initialized else -1

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"{WHO}(page_size={self.page_size}, layers={len(self)}, tokens={self.get_seq_length()})"

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (b, hk, n, d) and (b, hk, n, dv); returns all there is, (b, hk, length, d) and (b, hk, length, dv).

        What it returns holds until the next update of this layer.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(PagedLayer(self.page_size, self.num_pages))
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].length if layer_idx < len(self.layers) else 0

    get_query_offset = get_seq_length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def reset(self) -> None:
        for layer in self.layers:
            layer.select([])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens; their number is negative, as in Transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"{WHO}: crop takes a number of tokens to remove, below 0; got {tokens_to_remove}.")
        for layer in self.layers:
            layer.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.layers:
            layer.select([row for row in range(len(layer.rows)) for _ in range(repeats)])

    def _select(self, indices: Tensor) -> None:
        chosen = None
        for layer in self.layers:
            if layer.rows and chosen is None:
                chosen = torch.arange(len(layer.rows))[indices.cpu()].tolist()
            if chosen is not None:
                layer.select(chosen)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{WHO}: holds keys and values only; this model has states of other kinds. Use DynamicCache.")

    update_recurrent_state = update_indexer = get_conv_state = get_recurrent_state = update_conv_state


class PagedLayer:
    """The pages of one layer, and which sequence has which; all sequences have the same length."""

    def __init__(self, page_size: int, num_pages: int | None):
        self.page_size, self.num_pages, self.length = page_size, num_pages, 0
        self.rows: list[list[int]] = []  # the pages of each sequence
        self.uses: list[int] = []  # of each page: sequences that have it
        self.free: list[int] = []
        self.pages: tuple[Tensor, Tensor] | None = None  # (pages, page_size, hk, d) and (pages, page_size, hk, dv)
        self.table: Tensor | None = None  # `rows` on the device, (b, pages of each)

    @property
    def is_initialized(self) -> bool:
        return self.pages is not None

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise RuntimeError(f"{WHO}: is for inference, and a gradient is needed. Call the model in torch.no_grad().")
        b, _, new, _ = keys.shape
        if not self.rows:
            self.rows, self.length = [[] for _ in range(b)], 0
        if len(self.rows) != b:
            raise ValueError(f"{WHO}: keys must be (b, hk, n, d) of b = {len(self.rows)} sequences; got b = {b}.")
        if self.pages is None:
            self.pages = self._empty(keys.movedim(1, 2), 0), self._empty(values.movedim(1, 2), 0)
        if new:
            self._make_room(new)
            table = self._table()
            place = torch.arange(self.length, self.length + new, device=keys.device)
            page = table[:, place // self.page_size].long()
            for pages, x in zip(self.pages, (keys, values), strict=True):
                pages[page, place % self.page_size] = x.transpose(1, 2).to(pages.dtype)
            self.length += new
        k_pages, v_pages = self.pages
        return InPages(k_pages, self._table(), self.length), InPages(v_pages, self._table(), self.length)

    def select(self, chosen: list[int]) -> None:
        """Sequence n becomes what sequence chosen[n] is; none chosen: all is empty."""
        rows = [list(self.rows[row]) for row in chosen]
        for page in (page for row in rows for page in row):
            self.uses[page] += 1
        for row in self.rows:
            self._give_back(row)
        self.rows, self.table = rows, None
        self.length = self.length if rows else 0

    def crop(self, tokens: int) -> None:
        self.length = max(self.length - tokens, 0)
        needed = -(-self.length // self.page_size)
        for row in self.rows:
            self._give_back(row[needed:])
            del row[needed:]
        self.table = None

    def _make_room(self, new: int) -> None:
        """Pages for `new` more tokens, and a page of its own for every sequence that goes on in a shared one."""
        needed = -(-(self.length + new) // self.page_size)
        shared = [row for row in self.rows if self.length % self.page_size and self.uses[row[-1]] > 1]
        for row in shared:
            if self.uses[row[-1]] > 1:  # the last sequence in it keeps it
                old, own = row[-1], self._take(needed)
                self.uses[old] -= 1
                row[-1] = own
                for pages in self.pages or ():
                    pages[own] = pages[old]
                self.table = None
        for row in self.rows:
            if len(row) < needed:
                row += [self._take(needed) for _ in range(needed - len(row))]
                self.table = None

    def _take(self, needed: int) -> int:
        """A free page; `needed` is how many a sequence takes, for the message if there is none."""
        if not self.free:
            self._grow(needed)
        page = self.free.pop()
        self.uses[page] = 1
        return page

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.uses[page] -= 1
            if not self.uses[page]:
                self.free.append(page)

    def _grow(self, needed: int) -> None:
        have = len(self.uses)
        if have and self.num_pages is not None:
            raise ValueError(
                f"{WHO}: num_pages must hold all tokens; {len(self.rows)} sequences need up to {needed} pages of "
                f"{self.page_size} tokens each, there are {have}. Raise num_pages, or leave it out."
            )
        more = self.num_pages or max(have, 2 * len(self.rows))
        assert self.pages is not None
        k_pages, v_pages = (torch.cat([pages, self._empty(pages, more)]) for pages in self.pages)
        self.pages = k_pages, v_pages
        self.uses += [0] * more
        self.free += reversed(range(have, have + more))

    def _empty(self, like: Tensor, count: int) -> Tensor:
        """Pages for what `like` (.., .., heads, d) holds: memory as it is, which no attention looks at."""
        return like.new_empty(count, self.page_size, *like.shape[2:])

    def _table(self) -> Tensor:
        if self.table is None and self.pages is not None:
            self.table = torch.tensor(self.rows, dtype=torch.int32, device=self.pages[0].device)
        assert self.table is not None
        return self.table


class InPages(Tensor):
    """Keys or values (b, hk, length, d) that lie in pages; with `heads_last` (b, length, hk, d)."""

    pages: Tensor
    table: Tensor
    heads_last: bool

    @staticmethod
    def __new__(cls, pages: Tensor, table: Tensor, length: int, heads_last: bool = False) -> InPages:
        b, (hk, d) = table.shape[0], pages.shape[2:]
        shape = (b, length, hk, d) if heads_last else (b, hk, length, d)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=pages.dtype, device=pages.device)  # type: ignore
        self.pages, self.table, self.heads_last = pages, table, heads_last
        return self

    @property
    def length(self) -> int:
        return self.shape[1 if self.heads_last else 2]

    def whole(self) -> Tensor:
        """The same as a plain tensor."""
        needed = -(-self.length // self.pages.shape[1])
        pages = self.pages[self.table[:, :needed].long()].flatten(1, 2)[:, : self.length]
        return (pages if self.heads_last else pages.transpose(1, 2)).contiguous()  # as this tensor says it is

    def __repr__(self, **_: Any) -> str:
        return f"InPages(shape={tuple(self.shape)}, dtype={self.dtype}, page_size={self.pages.shape[1]})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # pyrefly: ignore
        if func is torch.ops.aten.transpose.int and {axis % 4 for axis in args[1:]} == {1, 2}:
            x = args[0]
            return cls(x.pages, x.table, x.length, not x.heads_last)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            x = args[0]
            return cls(x.pages, x.table, x.length, x.heads_last)
        args, kwargs = tree_map_only(InPages, InPages.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def attend_in_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: tuple[int | None, int | None],
    softcap: float,
    sinks: Tensor | None,
) -> Tensor | None:
    """(b, lq, hq, d) and (b, length, hk, d) -> (b, lq, hq, dv), of checked arguments, where keys and values lie.

    None: they are not in pages, or the kernel does not run here; any operation gathers them.
    """
    if not isinstance(k, InPages) or not isinstance(v, InPages):
        return None
    lengths = torch.full((q.shape[0],), k.length, dtype=torch.int32, device=q.device)
    return attend_table(q, k.pages, v.pages, lengths, k.table, scale, window, softcap, sinks)
