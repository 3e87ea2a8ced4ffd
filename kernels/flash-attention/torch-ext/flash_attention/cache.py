"""Attention over a cache of keys and values: in one piece per sequence, or in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import (
    can_read_values,
    check_floats,
    check_qkv,
    check_sinks,
    check_slopes,
    check_softcap,
    check_tensors,
    check_whole_numbers,
    check_window,
    shape_text,
)
from .intervals import cached
from .op import attend
from .paged_op import attend_table
from .pages import check_pages, check_room, check_table, gather_pages

OP = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append k and v to the caches, in place, and let the rows of q see what is in there then.

    cache_seqlens    (b,) or one number: keys in the cache before the call; None: it is full
    cache_batch_idx  (b,): the cache entry of each sequence, if not its own number
    cache_leftpad    (b,): keys at the start of the cache that are not part of the sequence
    block_table      (b, most pages): the caches are pages, and sequence i has the pages block_table[i], in order
    The diagonal of the last row is the last key. The rest is as in flash_attn_func. num_splits is a hint for GPUs.

    Shapes   q (b, lq, hq, d), k_cache (b, lk, hk, d) or (pages, page, hk, d), v_cache likewise with dv,
             k (b, l, hk, d), v (b, l, hk, dv)  ->  (b, lq, hq, dv), lse (b, hq, lq)
    Dtypes   as flash_attn_func; whole numbers int32 or int64
    Grads    q, k_cache and v_cache, as long as nothing is appended
    Raises   as flash_attn_func; ValueError on CPU: more keys than the cache holds; rotary_cos, which is not supported
    Source   flash_attn_with_kvcache of flash-attn 2
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise ValueError(f"{OP}: rotary_cos and rotary_sin must be None; got tensors. Rotate q and k before the call.")
    paged = block_table is not None
    check_qkv(OP, q, k_cache, v_cache, ("q", "k_cache", "v_cache"), paged or cache_batch_idx is not None)
    b = q.shape[0]
    window, softcap = check_window(OP, window_size, causal), check_softcap(OP, softcap)
    check_slopes(OP, alibi_slopes, q, b)
    check_sinks(OP, s_aux, q)
    for name, tensor in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if tensor is not None:
            check_whole_numbers(OP, name, tensor, "b", b)
            if paged:
                raise ValueError(f"{OP}: {name} must be None with block_table; got a tensor.")
    if paged:
        check_table(OP, "block_table", block_table, b)
    lengths = _lengths(q, k_cache, cache_seqlens, block_table)
    _check_values(k_cache, lengths, cache_batch_idx, cache_leftpad)
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise ValueError(f"{OP}: cache_seqlens must say where k and v go; got None.")
        _append(q, k_cache, v_cache, k, v, lengths, cache_batch_idx, block_table)
        lengths = lengths + (0 if k is None else k.shape[1])
    elif can_read_values(lengths):
        check_room(OP, lengths, 0, _capacity(k_cache, block_table))
    if block_table is not None and alibi_slopes is None and not return_softmax_lse:
        check_pages(OP, "block_table", block_table, lengths, *k_cache.shape[:2])
        out = attend_table(q, k_cache, v_cache, lengths, block_table, softmax_scale, window, softcap, s_aux)
        if out is not None:
            return out
    if block_table is not None:
        k_cache, v_cache = (gather_pages(OP, cache, block_table, b, lengths) for cache in (k_cache, v_cache))
    elif cache_batch_idx is not None:
        k_cache, v_cache = k_cache[cache_batch_idx], v_cache[cache_batch_idx]
    intervals = cached(q.shape[1], 0 if cache_leftpad is None else cache_leftpad, lengths, window)
    out, lse = attend(q, k_cache, v_cache, intervals, None, alibi_slopes, s_aux, softmax_scale, softcap)
    return (out, lse) if return_softmax_lse else out


def _lengths(q: Tensor, k_cache: Tensor, cache_seqlens: Tensor | int | None, block_table: Tensor | None) -> Tensor:
    b = q.shape[0]
    if isinstance(cache_seqlens, Tensor):
        return check_whole_numbers(OP, "cache_seqlens", cache_seqlens, "b", b)
    whole = _capacity(k_cache, block_table) if cache_seqlens is None else cache_seqlens
    return torch.full((b,), whole, dtype=torch.int32, device=q.device)


def _check_values(k_cache: Tensor, lengths: Tensor, batch_idx: Tensor | None, leftpad: Tensor | None) -> None:
    """Entries that there are, and padding within the sequence. Where a look at values is free."""
    if batch_idx is not None and can_read_values(batch_idx):
        for i, entry in enumerate(batch_idx.tolist()):
            if not 0 <= entry < k_cache.shape[0]:
                raise ValueError(
                    f"{OP}: cache_batch_idx must name entries 0 ... {k_cache.shape[0] - 1} of the cache; "
                    f"got {entry} in sequence {i}."
                )
    if leftpad is not None and can_read_values(leftpad) and can_read_values(lengths):
        for i, (pad, length) in enumerate(zip(leftpad.tolist(), lengths.tolist(), strict=True)):
            if not 0 <= pad <= length:
                raise ValueError(
                    f"{OP}: cache_leftpad must be 0 ... cache_seqlens = {length} in sequence {i}; got {pad}."
                )


def _capacity(k_cache: Tensor, block_table: Tensor | None) -> int:
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: Tensor,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:
    if k is None or v is None:
        raise ValueError(f"{OP}: k and v must be given together; got {'v' if k is None else 'k'} alone.")
    check_tensors(OP, {"k_cache": k_cache, "k": k, "v": v})
    new = k.shape[1] if k.dim() == 4 else 0
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (q.shape[0], new, *cache.shape[2:])
        if tuple(x.shape) != wanted:
            raise ValueError(f"{OP}: {name} must be (b, l, hk, d) = {wanted} for {name}_cache; got {shape_text(x)}.")
    check_floats(OP, {"k_cache": k_cache, "k": k, "v": v})
    if can_read_values(lengths):
        check_room(OP, lengths, new, _capacity(k_cache, block_table))
    place = lengths.long()[:, None] + torch.arange(new, device=q.device)  # (b, l)
    if block_table is None:
        entry = torch.arange(q.shape[0], device=q.device) if cache_batch_idx is None else cache_batch_idx
        entry = entry[:, None].expand_as(place)
    else:
        page = k_cache.shape[1]
        check_pages(OP, "block_table", block_table, lengths + new, *k_cache.shape[:2])
        entry, place = block_table.long().gather(1, place // page), place % page
    k_cache[entry, place] = k.to(k_cache.dtype)  # under autocast they may differ
    v_cache[entry, place] = v.to(v_cache.dtype)
