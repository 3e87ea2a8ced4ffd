"""Context parallelism: Diffusers exchanges heads (Ulysses) or keys (ring) between processes, around two functions here.

Forward is the attention of one process, for the tensors that reached it. Backward runs it again and asks autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def parallel_attention(
    local_attention: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    parallel_config: Any,
) -> Any:
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    return _templated_context_parallel_attention(
        query,
        key,
        value,
        attn_mask,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        return_lse,
        forward_op=partial(_forward, local_attention),
        backward_op=_backward,
        _parallel_config=parallel_config,
    )


def _forward(
    local_attention: Callable,
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    *,
    _save_ctx: bool,
    _parallel_config: Any,
) -> Any:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return local_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa, return_lse)

    if _save_ctx:
        ctx.save_for_backward(query, key, value)
        ctx.attend = attend
    return attend(query, key, value)


def _backward(
    ctx: Any,
    grad_out: Tensor,
    query: Any = None,
    key: Any = None,
    value: Any = None,
    out: Any = None,
    lse: Any = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value. In a ring: of the part that these keys have in `out`."""
    in_ring = out is not None and lse is not None
    saved = (query, key, value) if in_ring else ctx.saved_tensors
    inputs = [x.detach().requires_grad_() for x in saved]
    with torch.enable_grad():
        result = ctx.attend(*inputs)
    if not in_ring:
        return torch.autograd.grad(result[0] if isinstance(result, tuple) else result, inputs, grad_out)
    # out = sum of weight * part over the parts of the ring, and weight = exp(part_lse - lse) depends on the keys too.
    part, part_lse = result
    weight = (part_lse.detach() - lse).exp().unsqueeze(-1)  # (batch, length, heads, 1)
    grad_part = weight * grad_out
    grad_lse = (grad_part * (part.detach() - out)).sum(-1)  # (batch, length, heads)
    return torch.autograd.grad(result, inputs, (grad_part.to(part.dtype), grad_lse.to(part_lse.dtype)))
