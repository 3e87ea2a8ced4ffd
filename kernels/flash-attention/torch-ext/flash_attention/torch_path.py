"""The torch path of attention: torch's own fused kernel piece by piece where it can, plain products where it can't.

What one call of torch's scaled_dot_product_attention means is that call (`sdpa`), gradient included; op.py asks
before. The two functions behind the ops take everything: `forward` and `backward`, which recomputes the scores.
Neither makes a buffer of all rows times all keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .pieces import CAUSAL, MASKED, Piece, mask_of, pieces, rows_at_a_time

SCORES = 1 << 21  # scores held at once by plain products: 8 MiB in float32, about what a core's cache takes
NOT_ASKED_FOR = (0,)

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # gives the log-sum-exp too


def sdpa(q: Tensor, k: Tensor, v: Tensor, form: str, scale: float) -> Tensor:
    """One call of torch's, (b, l, h, d) in and out, for a form of plain_form; autocast is its own business."""
    (_, _, hq, d), (_, _, hk, dv) = q.shape, v.shape
    if d != dv:  # filled up with zeros, or else torch leaves its fused kernel for one that holds all scores
        wide = max(d, dv)
        return sdpa(_widen(q, wide), _widen(k, wide), _widen(v, wide), form, scale)[..., :dv]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = None
    if form == "bottom-right":
        lq, lk = q.shape[2], k.shape[2]
        mask = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)
    causal = form == "causal"
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=hq != hk)
    return out.transpose(1, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    diag: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """out (b, lq, hq, dv) in q.dtype and lse (b, hq, lq); a row that sees nothing gets 0 and -inf (or its sink)."""
    (b, lq, hq, _), dv = q.shape, v.shape[3]
    out = q.new_zeros(b, lq, hq, dv)
    lse = q.new_full((b, hq, lq), float("-inf"), dtype=_wide(q))
    if 0 in q.shape[:3]:
        return out, lse
    fused = q.is_cpu and not softcap and 0 not in q.shape and 0 not in v.shape
    if fused and q.shape[3] != dv:
        q, k, v = (_widen(x, max(q.shape[3], dv)) for x in (q, k, v))
    for piece in pieces(lo, hi):
        if fused:
            _forward_fused(piece, q, k, v, lo, hi, bias, slopes, diag, scale, out, lse)
            continue
        for part in rows_at_a_time(piece, _rows_for(piece, hq), lo, hi):
            s, _ = _scores(part, q, k, lo, hi, bias, slopes, diag, scale, softcap)
            part_lse = torch.logsumexp(s, -1)  # (b, hq, rows)
            p = torch.exp(s - _finite(part_lse)[..., None])
            out[part.batch, part.rows] = _mix(p, v[part.batch, part.keys].to(p.dtype)).to(out.dtype)
            lse[part.batch, :, part.rows] = part_lse
    if sinks is not None:  # one more logit in the sum, which has no value
        sinks = sinks.to(lse.dtype)[:, None]
        out *= torch.sigmoid(lse - sinks).transpose(1, 2)[..., None].to(out.dtype)
        lse = torch.logaddexp(lse, sinks)
    return out, lse


def _forward_fused(
    piece: Piece,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    diag: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write the piece's part of out and lse."""
    if piece.kind == CAUSAL and scale <= 0:  # where torch's own causal mask makes NaN
        piece = piece._replace(kind=MASKED)
    mask = _additive(piece, lo, hi, bias, slopes, diag, lse.dtype)
    mask = None if mask is None else _plain_rows(mask)
    parts = ((q, piece.rows), (k, piece.keys), (v, piece.keys))
    heads_first = (_plain_rows(x[piece.batch, part]).transpose(1, 2) for x, part in parts)
    piece_out, piece_lse = _fused(*heads_first, 0.0, piece.kind == CAUSAL and mask is None, attn_mask=mask, scale=scale)
    if bias is not None and mask is not None:  # of a row whose keys are all masked torch says 0
        piece_lse = piece_lse.masked_fill((mask == float("-inf")).all(-1), float("-inf"))
    out[piece.batch, piece.rows] = piece_out.transpose(1, 2)[..., : out.shape[3]]
    lse[piece.batch, :, piece.rows] = piece_lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    diag: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    softcap: float,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbias, dsinks, each in the dtype of its input; sums in float32 (float64 for float64).

    With p = exp(s - lse), dp = dout @ v.T and delta = sum(dout * out) - dlse, the scores' gradient is p * (dp - delta).
    """
    wide = _wide(q)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
    dbias = bias.new_zeros(bias.shape if needs_bias else NOT_ASKED_FOR, dtype=wide) if bias is not None else None
    delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)  # (b, hq, lq)
    if dlse is not None:
        delta = delta - dlse
    for piece in pieces(lo, hi) if 0 not in q.shape[:3] else ():
        for part in rows_at_a_time(piece, _rows_for(piece, q.shape[2]), lo, hi):
            rows, keys = (part.batch, part.rows), (part.batch, part.keys)
            per_row = (part.batch, slice(None), part.rows)
            s, cap_slope = _scores(part, q, k, lo, hi, bias, slopes, diag, scale, softcap)
            p = torch.exp(s - _finite(lse[per_row])[..., None])  # (b, hq, rows, keys)
            part_dout = dout[rows].to(wide)
            ds = p * (_products(part_dout, v[keys].to(wide)) - delta[per_row][..., None])
            if dbias is not None and needs_bias:
                _add_summed(dbias, ds, part)
            if cap_slope is not None:
                ds = ds * cap_slope
            dq[rows] = _mix(ds, k[keys].to(wide)) * scale
            dk[keys] += _mix_back(ds, q[rows].to(wide), k.shape[2]) * scale
            dv[keys] += _mix_back(p, part_dout, v.shape[2])
    if dbias is None:
        dbias = q.new_zeros(NOT_ASKED_FOR)
    elif bias is not None:
        dbias = dbias.to(bias.dtype if needs_bias else q.dtype)
    dsinks = q.new_zeros(NOT_ASKED_FOR)
    if sinks is not None:
        share = torch.exp(sinks.to(wide)[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
        dsinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias, dsinks


def _scores(
    part: Piece,
    q: Tensor,
    k: Tensor,
    lo: Tensor,
    hi: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    diag: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    """(b, hq, rows, keys) as they go into the softmax, and the softcap's derivative, if there is one."""
    wide = _wide(q)
    s = _products(q[part.batch, part.rows].to(wide) * scale, k[part.batch, part.keys].to(wide))
    cap_slope = None
    if softcap:
        capped = torch.tanh(s / softcap)
        s, cap_slope = capped * softcap, 1 - capped * capped
    added = _additive(part, lo, hi, bias, slopes, diag, wide)
    return (s if added is None else s + added), cap_slope


def _additive(
    piece: Piece,
    lo: Tensor,
    hi: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    diag: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """What is added to the piece's scores, (b or 1, h or 1, rows, keys): bias, ALiBi, -inf where a row does not see."""
    added = None
    if bias is not None:
        entries = piece.batch if bias.shape[0] > 1 else slice(None)
        rows = piece.rows if bias.shape[2] > 1 else slice(None)
        added = bias[entries, :, rows, piece.keys].to(dtype)
    if slopes is not None and diag is not None:
        key = torch.arange(piece.keys.start, piece.keys.stop, device=lo.device)
        per_head = slopes[None] if slopes.dim() == 1 else slopes[piece.batch]
        distance = (diag[piece.batch, piece.rows][:, None, :, None] - key).abs()
        alibi = per_head.to(dtype)[..., None, None] * -distance
        added = alibi if added is None else added + alibi
    if piece.kind == MASKED or (piece.kind == CAUSAL and added is not None):
        outside = mask_of(piece, lo, hi)
        zeros = torch.zeros((), dtype=dtype, device=lo.device) if added is None else added
        added = torch.where(outside, float("-inf"), zeros)
    if added is not None:  # a row for each row: torch's kernel wants it
        rows = piece.rows.stop - piece.rows.start
        added = added.expand(*added.shape[:2], rows, added.shape[3])
    return added


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """(b, r, hq, d), (b, n, hk, d) -> (b, hq, r, n): each head of queries with its own head of keys."""
    (b, r, hq, d), (n, hk) = rows.shape, keys.shape[1:3]
    grouped = rows.reshape(b, r, hk, hq // hk, d).permute(0, 2, 3, 1, 4).reshape(b, hk, hq // hk * r, d)
    return (grouped @ keys.permute(0, 2, 3, 1)).view(b, hq, r, n)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """(b, hq, r, n), (b, n, hk, d) -> (b, r, hq, d)."""
    (b, hq, r, n), (hk, d) = weights.shape, values.shape[2:]
    mixed = weights.reshape(b, hk, hq // hk * r, n) @ values.transpose(1, 2)
    return mixed.view(b, hq, r, d).transpose(1, 2)


def _mix_back(weights: Tensor, rows: Tensor, hk: int) -> Tensor:
    """(b, hq, r, n), (b, r, hq, d) -> (b, n, hk, d), summed over rows and the heads of a group."""
    (b, hq, r, n), d = weights.shape, rows.shape[3]
    by_head = rows.transpose(1, 2).reshape(b, hk, hq // hk * r, d)
    return (weights.view(b, hk, hq // hk * r, n).mT @ by_head).transpose(1, 2)


def _add_summed(dbias: Tensor, ds: Tensor, part: Piece) -> None:
    """Add the scores' gradient, summed over the axes along which the bias was repeated."""
    at = [part.batch, slice(None), part.rows, part.keys]
    repeated = [axis for axis in range(3) if dbias.shape[axis] == 1]
    for axis in repeated:
        at[axis] = slice(None)
    dbias[tuple(at)] += ds.sum(repeated, keepdim=True) if repeated else ds


def _rows_for(piece: Piece, heads: int) -> int:
    across = (piece.batch.stop - piece.batch.start) * heads * (piece.keys.stop - piece.keys.start)
    return min(max(SCORES // max(across, 1), 1), 256)


def _finite(lse: Tensor) -> Tensor:
    """0 in place of -inf: the row's scores are all -inf, and minus 0 they stay that."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _plain_rows(x: Tensor) -> Tensor:
    """Torch's kernel reads whatever follows in memory, and does not look at the last axis' stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _widen(x: Tensor, size: int) -> Tensor:
    return x if x.shape[3] == size else F.pad(x, (0, size - x.shape[3]))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
