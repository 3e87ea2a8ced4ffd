"""The public attention over pages: checks, the op, and its torch path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_path
from ._bridge import Lazy, jax_op
from .checks import (
    check_cu_seqlens,
    check_one_device,
    check_qkv,
    check_softcap,
    check_whole_numbers,
    shape_text,
)
from .intervals import packed
from .pages import check_pages, check_table

OP = "paged_attention"
MOST_MASKED = 1 << 22  # rows times keys of a sequence up to which torch's own attention gets a mask
ON_TPU = (torch.float32, torch.bfloat16)


def _by_sequence(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    sinks: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
) -> Tensor:
    """One sequence after the other: its pages in one piece, then attention as everywhere."""
    out = q.new_zeros(*q.shape[:2], v_pages.shape[3])
    if 0 in k_pages.shape[:2]:
        return out
    page, starts, plain = k_pages.shape[1], q_starts.tolist(), not softcap and sinks is None
    for n, length in enumerate(lengths.clamp(0, page_table.shape[1] * page).tolist()):
        start, end = starts[n], starts[n + 1]
        rows = end - start
        if not rows or not length:
            continue
        # Keys before the first row's window are left out, in whole pages.
        first = 0 if window < 0 else max(length - rows - window, 0) // page
        pages = page_table[n, first : -(-length // page)].clamp(0, k_pages.shape[0] - 1)
        keys, values = (x[pages].flatten(0, 1)[: length - first * page] for x in (k_pages, v_pages))
        one = q[start:end]
        if plain and rows <= length and rows * length <= MOST_MASKED:
            out[start:end] = _in_one_call(one, keys, values, scale, causal, window)
            continue
        whole = torch.tensor([0, rows, keys.shape[0]], dtype=torch.int32, device=q.device)
        sides = (None if window < 0 else window, 0 if causal else None)
        lo, hi, _ = packed(rows, whole[:2], whole[:1], whole[2:], sides)
        one, keys, values = one[None], keys[None], values[None]
        attended, _ = torch_path.forward(one, keys, values, lo, hi, None, None, sinks, None, scale, softcap)
        out[start:end] = attended[0]
    return out


def _in_one_call(q: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool, window: int) -> Tensor:
    """(rows, hq, d), (n, hk, d), (n, hk, dv) -> (rows, hq, dv), the last row at the last key; each row sees a key."""
    rows, n = q.shape[0], keys.shape[0]
    mask = None
    if rows > 1 and (causal or window >= 0):
        position = torch.arange(n - rows, n, device=q.device)[:, None]
        key = torch.arange(n, device=q.device)
        mask = key <= position if causal else torch.ones_like(key, dtype=torch.bool)
        mask = mask if window < 0 else mask & (key >= position - window)
    elif window >= 0:
        keys, values = keys[max(n - 1 - window, 0) :], values[max(n - 1 - window, 0) :]
    heads_first = (x.transpose(0, 1)[None] for x in (q, keys, values))
    grouped = q.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


paged_attention_op = jax_op(
    OP,
    namespace=__package__,
    fn=Lazy(".paged:paged_attention", __package__),
    torch_fn=_by_sequence,
    shape_fn=Lazy(".paged_shapes:paged_attention", __package__),
)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    context_lengths: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    *,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float | None = 0.0,
) -> Tensor:
    """Queries of several sequences, whose keys and values lie in pages: decode, prefill in parts, or both at once.

    context_lengths  keys of each sequence, those of the queries of this call included: they are in the pages already
    page_table       the pages of each sequence in order; what follows the last one that it needs may be anything
    cu_seqlens_q     rows cu_seqlens_q[n] ... cu_seqlens_q[n + 1] of q are the last queries of sequence n; may be none
    window_left      keys before its own that a query sees; -1: all
    sinks            one more logit per head in the softmax's denominator
    Rows that see no key, and those past the last sequence, are 0.

    Shapes   q (total_q, hq, d), k_pages (num_pages, page, hk, d), v_pages (num_pages, page, hk, dv),
             context_lengths (s,), page_table (s, most_pages), cu_seqlens_q (s + 1,), sinks (hq,)  ->  (total_q, hq, dv)
    Dtypes   float32, bfloat16; on CPU and CUDA also float16, float64; one for q and pages; softmax and sums in float32
             (float64 for float64); whole numbers int32 or int64
    Grads    none: for inference
    Raises   ValueError: shapes that do not match; a page of a number of rows that a TPU can't take; on CPU lengths
             and pages out of range (elsewhere, where a look at values would wait, they are cut to it).
             TypeError: dtypes outside the list above.  RuntimeError: a gradient is needed
    Source   flash-attn's flash_attn_with_kvcache for block_table, with vLLM's queries of any number
    """
    check_qkv(OP, q, k_pages, v_pages, ("q", "k_pages", "v_pages"), paged=True)
    if q.dim() != 3:
        raise ValueError(f"{OP}: q must be (total_q, hq, d); got {shape_text(q)}. Try q.flatten(0, 1).")
    check_one_device(OP, {"q": q, "context_lengths": context_lengths, "page_table": page_table, "sinks": sinks})
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"{OP}: sinks must be (hq,) = ({q.shape[1]},), one per head of q; got {shape_text(sinks)}.")
    s = check_whole_numbers(OP, "context_lengths", context_lengths, "s", None).shape[0]
    check_table(OP, "page_table", page_table, s)
    check_cu_seqlens(OP, "cu_seqlens_q", cu_seqlens_q, q.shape[0], "total_q", s)
    softcap = check_softcap(OP, softcap)
    if not isinstance(window_left, int) or window_left < -1:
        raise ValueError(f"{OP}: window_left must be a count of keys, or -1 for no limit; got {window_left}.")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_pages, v_pages)):
        raise RuntimeError(f"{OP}: has no gradient, and one is needed. Call it under torch.no_grad().")
    if q.dtype not in ON_TPU and paged_attention_op.path_for(q) != "torch":
        raise TypeError(
            f"{OP}: q is {str(q.dtype).removeprefix('torch.')}; supported by the kernel: float32, bfloat16. "
            f"Keep the cache in bfloat16."
        )
    check_pages(OP, "page_table", page_table, context_lengths, *k_pages.shape[:2])
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    tables = (context_lengths, page_table, cu_seqlens_q)
    return paged_attention_op(q, k_pages, v_pages, *tables, sinks, scale, causal, window_left, softcap)


def runs_in_pages(q: Tensor, *others: Tensor) -> bool:
    """Whether the kernel runs on these, so that gathering the pages first would be a waste."""
    if q.dtype not in ON_TPU or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others))):
        return False
    if q.device.type == "tpu":
        return True
    return not torch.compiler.is_compiling() and paged_attention_op.path_for(q) != "torch"


def attend_table(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    scale: float | None,
    window: tuple[int | None, int | None],
    softcap: float,
    sinks: Tensor | None,
) -> Tensor | None:
    """(b, lq, hq, d) -> (b, lq, hq, dv), of checked arguments, by the kernel. None: this call has to gather."""
    b, lq = q.shape[:2]
    left, right = window
    if right not in (None, 0) or not runs_in_pages(q, k_pages, v_pages):
        return None
    if k_pages.shape[1] * k_pages.shape[2] % (32 // k_pages.element_size()):  # a page is no whole registers
        return None
    starts = torch.arange(b + 1, dtype=torch.int32, device=q.device) * lq
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tables = (lengths, page_table, starts)
    options = (sinks, scale, right == 0, -1 if left is None else left, softcap)
    return paged_attention_op(q.flatten(0, 1), k_pages, v_pages, *tables, *options).unflatten(0, (b, lq))
