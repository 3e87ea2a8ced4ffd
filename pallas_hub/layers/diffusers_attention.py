"""What Diffusers calls under the backend "pallas": its layout and arguments, handed to the flash-attention kernel.

Tensors are (batch, length, heads, head_dim), as everywhere in Diffusers; the kernel's scaled_dot_product_attention has
torch's layout, with heads before length. flash_attn_func, which has Diffusers' layout, also gives the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pallas_hub.layers import diffusers_backend
from pallas_hub.layers.diffusers_parallel import parallel_attention
from pallas_hub.layers.first_call import fetched_at_first_call


def attention_function(name: str) -> Callable:
    """The function of the backend `name`. Diffusers reads its parameters to know what it can take."""
    attend = fetched_at_first_call(lambda: _function_of(name, "scaled_dot_product_attention"))
    attend_with_lse = fetched_at_first_call(lambda: _function_of(name, "flash_attn_func"))

    def local_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        return_lse: bool,
    ) -> Any:
        if return_lse:
            _check_lse(query, key, attn_mask, is_causal)
            out, lse, _ = attend_with_lse(
                query, key, value, softmax_scale=scale, causal=is_causal, return_attn_probs=True
            )
            return out, lse.transpose(1, 2)  # (batch, length, heads), as Diffusers has it
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)

    def pallas_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        attn_mask = _checked_mask(attn_mask, query, key)
        _check_dropout(dropout_p)
        if _parallel_config is None:
            return local_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa, return_lse)
        return parallel_attention(
            local_attention, query, key, value, attn_mask, is_causal, scale, enable_gqa, return_lse, _parallel_config
        )

    return pallas_attention


def _function_of(name: str, function: str) -> Callable:
    kernel = diffusers_backend.kernel_of(name)
    if not hasattr(kernel.module, function):
        raise ValueError(f'attention backend "{name}": kernel {kernel.repo_id} must have {function}, and has not.')
    return getattr(kernel.module, function)


def _checked_mask(attn_mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as scaled_dot_product_attention takes it; as with "native", (batch, keys) is a mask of keys."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(
            f'attention backend "pallas": attn_mask must be a tensor; got a {type(attn_mask).__name__}, which only '
            'the backend "flex" takes. Try set_attention_backend("flex") for this model.'
        )
    if attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        return attn_mask[:, None, None, :]
    return attn_mask


def _check_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError(
            f'attention backend "pallas": dropout_p must be 0, the kernel drops nothing; got {dropout_p}. Set the '
            'dropout of the attention layers to 0, or use set_attention_backend("native") to train with it.'
        )


def _check_lse(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None:
        raise ValueError(
            'attention backend "pallas": the log-sum-exp (return_lse=True, ring attention) comes without attn_mask; '
            f"got a mask {tuple(attn_mask.shape)}. Leave one of them out; Ulysses attention takes masks."
        )
    if is_causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            'attention backend "pallas": return_lse=True with is_causal=True needs as many queries as keys; got '
            f"{query.shape[1]} and {key.shape[1]}. Leave return_lse out."
        )
