"""The public functions, and the two torch ops under them: attention over intervals of keys, and its gradient.

What one call of torch's scaled_dot_product_attention means is that call, where no TPU is involved and no path is forced
or recorded: nothing is faster there, and autograd and compilers see through it. Everything else is the ops.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_path
from ._bridge import Lazy, jax_op
from ._bridge.paths import requested
from ._bridge.state import state
from .batching import batch_backward, batch_forward
from .checks import (
    autocast_dtype,
    can_read_values,
    check_cu_seqlens,
    check_dropout,
    check_floats,
    check_heads,
    check_padding,
    check_qkv,
    check_segment_ids,
    check_sinks,
    check_slopes,
    check_softcap,
    check_tensors,
    check_whole_numbers,
    check_window,
    is_regular,
    shape_text,
)
from .intervals import Intervals, Window, dense, packed, padded, segments
from .paged_cache import attend_in_pages
from .pages import gather_pages

QKV = ("q", "k", "v")
FEW_SCORES = 1 << 20  # with more, cutting the rows into pieces pays

attention_op = jax_op(
    "attention",
    namespace=__package__,
    fn=Lazy(".on_tpu:attention", __package__),
    torch_fn=torch_path.forward,
    shape_fn=Lazy(".shapes:attention", __package__),
)
attention_backward_op = jax_op(
    "attention_backward",
    namespace=__package__,
    fn=Lazy(".on_tpu:attention_backward", __package__),
    torch_fn=torch_path.backward,
    shape_fn=Lazy(".shapes:attention_backward", __package__),
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    segment_ids: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """softmax(q @ k.T * softmax_scale) @ v, each head of k and v serving hq / hk heads of q.

    causal       the last row's diagonal is the last key (bottom-right), whatever the lengths
    window_size  keys left and right of the diagonal that a row sees beside its own; -1: no limit
    softcap      scores become softcap * tanh(score / softcap); 0 or None: none
    alibi_slopes (hq,) or (b, hq): slope * distance from the diagonal is taken off the scores
    s_aux        (hq,): attention sinks, one more logit per head in the softmax's denominator
    segment_ids  (b, l), for lq = lk: rows see keys of their own id only; equal ids are next to each other
    key_padding_mask  (b, lk): False for keys that no row sees, at whichever end; they move no diagonal
    A row that sees no key is 0. The gradient is deterministic in any case. With return_attn_probs: out, lse, None,
    lse (b, hq, lq) being the logarithm of the softmax's denominator.

    Shapes   q (b, lq, hq, d), k (b, lk, hk, d), v (b, lk, hk, dv)  ->  (b, lq, hq, dv); any length may be 0
    Dtypes   float32, bfloat16, float16, float64 (not on TPU), the same for all; softmax and sums in float32
    Grads    q, k, v, s_aux, first order; also through lse
    Raises   ValueError: shapes that do not match, dropout_p above 0, hq no multiple of hk.  TypeError: dtypes
    Source   flash_attn_func of flash-attn 2; s_aux as in gpt-oss
    """
    op = "flash_attn_func"
    if not is_regular(q, k, v):
        check_qkv(op, q, k, v, QKV)
    check_dropout(op, dropout_p)
    window, softcap = check_window(op, window_size, causal), check_softcap(op, softcap)
    if not return_attn_probs and alibi_slopes is segment_ids is key_padding_mask is None:
        out = attend_in_pages(q, k, v, softmax_scale, window, softcap, s_aux)
        if out is not None:
            return out
    lq, lk = q.shape[1], k.shape[1]
    if lq == 1 and window[0] is not None and q.is_cpu and segment_ids is key_padding_mask is None:
        # A step of decoding: what the window leaves out is cut off, and the rest is often one call of torch's.
        first = max(lk - 1 - window[0], 0)
        k, v, lk, window = k[:, first:], v[:, first:], lk - first, (None, window[1])
    if not softcap and not return_attn_probs and alibi_slopes is s_aux is segment_ids is key_padding_mask is None:
        plain = plain_form(lq, lk, window, lk - lq)
        if plain is not None and runs_plain(q) and scale_of(q, softmax_scale) > 0:  # torch: NaN at 0 and below
            return torch_path.sdpa(q, k, v, plain, scale_of(q, softmax_scale))
    check_slopes(op, alibi_slopes, q, q.shape[0])
    check_sinks(op, s_aux, q)
    intervals = dense(q, lk, window, lk - lq)
    if segment_ids is not None:
        intervals = segments(check_segment_ids(op, segment_ids, q, k), intervals)
    bias = None
    if key_padding_mask is not None and lk:
        real = check_padding(op, key_padding_mask, k)
        intervals, bias = padded(real, intervals), _holes(real, q)
    out, lse = attend(q, k, v, intervals, bias, alibi_slopes, s_aux, softmax_scale, softcap)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """flash_attn_func for sequences of any lengths, packed one after the other.

    Sequence i has the rows from cu_seqlens_q[i] to cu_seqlens_q[i + 1] and the keys from cu_seqlens_k[i] to
    cu_seqlens_k[i + 1]; either may be none. Rows of no sequence are 0. The greatest lengths are not needed. With
    block_table, k and v are pages, and sequence i has the first keys of the pages block_table[i].

    Shapes   q (total_q, hq, d), k (total_k, hk, d) or (pages, page, hk, d), v likewise with dv, cu_seqlens (n + 1,),
             block_table (n, most pages)  ->  (total_q, hq, dv), lse (hq, total_q)
    Dtypes   as flash_attn_func; cu_seqlens and block_table int32 or int64
    Grads    as flash_attn_func
    Raises   as flash_attn_func; ValueError on CPU: cu_seqlens that decrease, do not start with 0 or end past the rows
    Source   flash_attn_varlen_func of flash-attn 2
    """
    op = "flash_attn_varlen_func"
    check_qkv(op, q, k, v, QKV, paged=block_table is not None)
    if q.dim() != 3:
        raise ValueError(f"{op}: q must be (total_q, hq, d); got {shape_text(q)}. Try q.flatten(0, 1).")
    check_dropout(op, dropout_p)
    window, softcap = check_window(op, window_size, causal), check_softcap(op, softcap)
    check_slopes(op, alibi_slopes, q, None)
    check_sinks(op, s_aux, q)
    check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, q.shape[0], "total_q", None)
    n = cu_seqlens_q.shape[0] - 1
    if block_table is None:
        check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, k.shape[0], "total_k", n)
        start, end = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    else:
        lengths = torch.diff(check_whole_numbers(op, "cu_seqlens_k", cu_seqlens_k, "n + 1", n + 1))
        k, v = (gather_pages(op, x, block_table, n, lengths) for x in (k, v))
        start = torch.arange(n, device=k.device) * k.shape[1]
        end = start + lengths
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    intervals = packed(q.shape[0], cu_seqlens_q, start, end, window)
    out, lse = attend(q[None], k[None], v[None], intervals, None, alibi_slopes, s_aux, softmax_scale, softcap)
    return (out[0], lse[0], None) if return_attn_probs else out[0]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its meaning: is_causal is aligned at the top left.

    attn_mask  True where a row sees a key; or floats that are added to the scores

    Shapes   query (..., hq, lq, d), key (..., hk, lk, d), value (..., hk, lk, dv), attn_mask broadcastable to
             (..., hq, lq, lk)  ->  (..., hq, lq, dv); hk = hq unless enable_gqa
    Dtypes   as flash_attn_func; attn_mask bool or a float
    Grads    query, key, value and a float attn_mask
    Raises   ValueError: shapes that do not match, dropout_p above 0, is_causal with attn_mask.  TypeError: dtypes
    Source   torch.nn.functional.scaled_dot_product_attention
    """
    op = "scaled_dot_product_attention"
    check_dropout(op, dropout_p)
    if isinstance(query, Tensor) and runs_plain(query):
        try:
            # Two mistakes that torch's fused kernel lets pass.
            if key.shape[:-1] != value.shape[:-1] or (is_causal and attn_mask is not None):
                raise ValueError
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        except (RuntimeError, TypeError, ValueError, AttributeError):
            _check_sdpa(op, query, key, value, attn_mask, is_causal, enable_gqa)
            raise
    _check_sdpa(op, query, key, value, attn_mask, is_causal, enable_gqa)
    lead = query.shape[:-3]
    q, k, v = (_heads_second(x) for x in (query, key, value))
    bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
    intervals = dense(q, k.shape[1], (None, 0 if is_causal else None), 0)
    out, _ = attend(q, k, v, intervals, bias, None, None, scale, 0.0)
    if query.dim() < 4:
        return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])
    return out.transpose(1, 2).unflatten(0, lead)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Checked arguments to out (b, lq, hq, dv), lse (b, hq, lq)."""
    q, k, v = in_one_dtype(q, k, v)
    lo, hi, diagonal = intervals
    return attention_op(
        q, k, v, lo, hi, bias, slopes, sinks, None if slopes is None else diagonal, scale_of(q, scale), softcap
    )


def plain_form(lq: int, lk: int, window: Window, shift: int) -> str | None:
    """How torch's own attention says which keys are seen; None if it can't, or should not.

    "all": every row sees every key; "causal": row i those up to i; "bottom-right": those up to i + shift, which takes a
    mask of lq * lk bytes, so for few rows only.
    """
    left, right = window
    # While compiling, a window is one: that some lengths fit into it would make a graph of their own.
    if left is not None and (torch.compiler.is_compiling() or left < lq - 1 + shift):
        return None
    if right is None or right >= lk - 1 - shift:
        return "all"
    if right != 0:
        return None
    if shift == 0:
        return "causal"
    few = shift > 0 and not torch.compiler.is_compiling() and lq * lk <= FEW_SCORES
    return "bottom-right" if few else None


def runs_plain(q: Tensor) -> bool:
    return (q.is_cpu or q.device.type != "tpu") and _nothing_forced()


@torch.compiler.assume_constant_result
def _nothing_forced() -> bool:
    """And no transform of torch.func: for them the op has rules of its own. torch.compile asks once, when it traces."""
    return not state.recorders and requested()[0] == "auto" and not torch._C._are_functorch_transforms_active()


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def scale_of(q: Tensor, scale: float | None) -> float:
    return max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)


def _holes(real: Tensor, q: Tensor) -> Tensor | None:
    """What keeps out keys that are missing between others, (b, 1, 1, lk); None if it is seen that there are none."""
    if can_read_values(real):
        at = torch.arange(real.shape[1], device=real.device)
        first = torch.where(real, at, real.shape[1]).amin(1)
        span = (torch.where(real, at + 1, 0).amax(1) - first).clamp(min=0)
        if torch.equal(span, real.sum(1)):
            return None
    return torch.zeros((), dtype=q.dtype, device=q.device).where(real, float("-inf"))[:, None, None]


def _check_sdpa(op: str, query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, enable_gqa: bool) -> None:
    tensors = {"query": query, "key": key, "value": value}
    check_tensors(op, {**tensors, **({} if attn_mask is None else {"attn_mask": attn_mask})})
    for name, x in tensors.items():
        if x.dim() < 3 or x.dim() != query.dim() or (x.dim() > 3 and x.shape[:-3] != query.shape[:-3]):
            raise ValueError(
                f"{op}: {name} must be (..., heads, length, d) with the axes before heads of query "
                f"{shape_text(query)}; got {shape_text(x)}."
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{op}: key must have d = {query.shape[-1]} like query {shape_text(query)}; got {shape_text(key)}."
        )
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"{op}: value must be shaped like key {shape_text(key)} up to d; got {shape_text(value)}.")
    hq, hk = query.shape[-3], key.shape[-3]
    if hq != hk and not (enable_gqa and query.dim() > 3):
        mend = " Try enable_gqa=True." if query.dim() > 3 and hk and hq % hk == 0 else ""
        raise ValueError(f"{op}: key must have as many heads as query, {hq}; got {hk}.{mend}")
    check_heads(op, hq, hk, "query", "key")
    check_floats(op, tensors)
    if attn_mask is None:
        return
    if is_causal:
        raise ValueError(f"{op}: give attn_mask or is_causal, not both. Put the causal part into attn_mask.")
    if attn_mask.dtype != torch.bool and attn_mask.dtype != query.dtype and attn_mask.dtype != torch.float32:
        raise TypeError(
            f"{op}: attn_mask must be bool, or float32 or of query's dtype to be added; "
            f"got {str(attn_mask.dtype).removeprefix('torch.')}."
        )
    wanted = (*query.shape[:-1], key.shape[-2])
    try:
        fits = torch.broadcast_shapes(attn_mask.shape, wanted) == torch.Size(wanted)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{op}: attn_mask must be broadcastable to (..., hq, lq, lk) = {wanted}; got {shape_text(attn_mask)}."
        )


def _heads_second(x: Tensor) -> Tensor:
    """(..., h, l, d) -> (b, l, h, d); without b, what torch takes for (b, l, d) is one head per entry."""
    return x[:, :, None] if x.dim() == 3 else x.flatten(0, -4).transpose(1, 2)


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as it is added, (b or 1, hq or 1, lq or 1, lk)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=query.dtype, device=mask.device).where(mask, float("-inf"))
    if query.dim() == 3:  # its entries are the batch, with one head each
        mask = mask.expand(*mask.shape[:-1], key.shape[-2])
        mask = mask[(None,) * (3 - mask.dim())]
        return mask[:, None]
    mask = mask[(None,) * (query.dim() - mask.dim())].expand(*[-1] * (query.dim() - 1), key.shape[-2])
    if any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*query.shape[:-3], *[-1] * 3)
    return mask.flatten(0, -4)


def _go_back(saved: Any, needs: Any, dout: Tensor, dlse: Tensor) -> tuple:
    inputs = (saved.q, saved.k, saved.v, saved.lo, saved.hi, saved.bias, saved.slopes, saved.sinks, saved.diag)
    dq, dk, dv, dbias, dsinks = attention_backward_op(
        *inputs, *saved.outputs, dout, dlse, saved.scale, saved.softcap, needs.bias
    )
    return dq, dk, dv, None, None, dbias, None, dsinks, None


attention_op.set_backward(_go_back, save=(*(a.name for a in attention_op.schema.tensors), "outputs"))
attention_op.set_vmap(batch_forward(attention_op))
attention_backward_op.set_vmap(batch_backward(attention_backward_op))
