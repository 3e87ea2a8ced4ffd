"""Attention layers of Transformers: switched through its own setting, but for one model at a time.

A layer reads from its config, at every call, which function of ALL_ATTENTION_FUNCTIONS it runs, and the model reads
there what masks that function takes. So the modules of a kernelized model get a copy of their config that names a
function of ours, under which masks are as for flash-attn: the padding, or nothing.

attn_implementation="pallas-hub/flash-attention" runs the same kernel by Transformers' own means. That loads the one
kernel for the whole process, and asks models for permission: some list the kernels that they take.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pallas_hub.layers import state
from pallas_hub.layers.loading import Kernel

LAYER = "flash_attn_func"
NAME = "pallas_flash"  # models look for "flash" in it
SETTING = "_attn_implementation"
_INTERNAL = "_attn_implementation_internal"
_TABLE = "ALL_ATTENTION_FUNCTIONS"

NOT_ASKED = 'torch\'s own attention serves a {device} as well; kernels=["attention"] swaps it all the same'


def is_attention(module: Any) -> bool:
    """True for layers whose forward looks into Transformers' table of attention functions."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and _TABLE in code.co_names and hasattr(getattr(module, "config", None), SETTING)


def owners(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(attention layer, the innermost PreTrainedModel that it is part of and whose config it shares, or None)."""
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    inside = {id(part): owner for owner in models for part in owner.modules()}  # the innermost comes last
    for module in model.modules():
        if is_attention(module):
            owner = inside.get(id(module))
            yield module, owner if owner is not None and owner.config is module.config else None


def recognise(module: Any, owner: Any) -> str | None:
    """Why the kernel may not stand in for the attention of this layer, or None if it may."""
    from transformers import PreTrainedModel

    if not state.has_class_forward(module):
        return "its forward was already replaced on the instance"
    if owner is None:
        return "the model around it does not share its config, so its masks may be those of another function"
    name = type(owner).__name__
    if not owner._supports_flash_attn:
        return f"{name} does not support flash attention, whose masks it would get"
    if type(owner)._check_and_adjust_attn_implementation is not PreTrainedModel._check_and_adjust_attn_implementation:
        return f"{name} has rules of its own for its attention: use attn_implementation, which asks it"
    return None


def switch(model: nn.Module, chosen: list[Any], kernel: Kernel) -> None:
    """Let the layers in `chosen` run the kernel, and the models around them make the masks for it."""
    name = _implementation_for(kernel)
    copies: dict[int, Any] = {}  # id of a config -> its copy, shared by deepcopy for configs within configs
    for module in model.modules():
        _own_configs(module, copies)
    for module in chosen:
        setattr(module.config, _INTERNAL, name)
        record = module.__dict__[state.RECORD]
        record.kernel, record.layer, record.implementation, record.setting = kernel, LAYER, name, SETTING


def _own_configs(module: Any, copies: dict[int, Any]) -> None:
    """Exchange the module's configs for copies, unless kernelize has done so already."""
    from transformers import PreTrainedConfig

    record = state.record_of(module)
    for name, value in list(module.__dict__.items()):
        if not isinstance(value, PreTrainedConfig) or (record is not None and name in record.new_values):
            continue
        state.exchange_value(module, name, copy.deepcopy(value, copies))


_NAMES: dict[str, Kernel] = {}


def _implementation_for(kernel: Kernel) -> str:
    """The name under which this kernel is in Transformers' tables."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    number = 1
    while (name := NAME if number == 1 else f"{NAME}#{number}") in _NAMES:
        if _NAMES[name].module is kernel.module:
            return name
        number += 1
    _NAMES[name] = kernel
    ALL_ATTENTION_FUNCTIONS.register(name, attention_function(kernel.module))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, padding_only)
    return name


def padding_only(
    batch_size: int, q_length: int, kv_length: int, *, attention_mask: torch.Tensor | None = None, **others: Any
) -> torch.Tensor | None:
    """The mask for attention_function, (batch, keys): the padding, or None. The layers tell the rest by arguments.

    As Transformers' flash_attention_mask, but values are looked at only where that is free and breaks no graph.
    """
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    if attention_mask.is_cpu and not torch.compiler.is_compiling() and attention_mask.shape[1] == kv_length:
        return None if bool(attention_mask.all()) else attention_mask
    return attention_mask


def attention_function(kernel: Any) -> Callable:
    """A function for Transformers' table that runs this kernel: as its flash_attention_forward, but without unpadding.

    Padded keys are left out by the kernel, so that no size depends on how many there are.
    """
    from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids

    def attention_forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if cache is not None:
            raise ValueError("kernelize: continuous batching needs attn_implementation; got a paged cache.")
        dtype = _dtype_of(module, query)
        q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
        if attention_mask is not None and attention_mask.dim() == 4:  # one of the caller's own, which says all
            if softcap or s_aux is not None:
                raise ValueError(
                    f"kernelize: attention_mask must be (batch, keys) for attention with a softcap or sinks; got "
                    f"{tuple(attention_mask.shape)}. Such masks need the original attention: unkernelize(model)."
                )
            keys = slice(attention_mask.shape[-1])
            heads_first = (x.transpose(1, 2) for x in (q, k[:, keys], v[:, keys]))
            out = kernel.scaled_dot_product_attention(
                *heads_first, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2), None
        if attention_mask is not None and k.shape[1] > attention_mask.shape[-1]:  # a cache with room to spare
            k, v = k[:, : attention_mask.shape[-1]], v[:, : attention_mask.shape[-1]]
        options: dict[str, Any] = {
            "dropout_p": dropout,
            "softmax_scale": scaling,
            "causal": module.is_causal if is_causal is None else is_causal,
            "softcap": softcap,
            "s_aux": None if s_aux is None else s_aux.to(q.dtype),
        }
        if sliding_window is not None and k.shape[1] > sliding_window:
            options["window_size"] = (sliding_window - 1, sliding_window - 1)
        if attention_mask is not None:
            out = kernel.flash_attn_func(q, k, v, **options, key_padding_mask=attention_mask)
            return _without_padding(out, attention_mask), None
        ends = (cu_seq_lens_q, cu_seq_lens_k)
        if None in ends and _is_packed_sequence(position_ids, q.shape[0]):
            ends, _ = prepare_fa_kwargs_from_position_ids(position_ids)
        if ends[0] is not None and ends[1] is not None:
            rows = (x.flatten(0, 1) for x in (q, k, v))
            out = kernel.flash_attn_varlen_func(*rows, *ends, **options)
            return out.unflatten(0, q.shape[:2]), None
        return kernel.flash_attn_func(q, k, v, **options), None

    return attention_forward


def _dtype_of(module: nn.Module, query: torch.Tensor) -> torch.dtype:
    """Norms kept in float32 make float32 queries in a model of another dtype, which its next layer does not take."""
    from transformers.integrations.flash_attention import get_target_dtype

    try:
        return get_target_dtype(query, module) or query.dtype
    except StopIteration:  # it looks for a linear layer
        return query.dtype


def _without_padding(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """0 in the rows of padding, as after padding what was unpadded. One row of a sequence is never padding."""
    rows = out.shape[1]
    if rows == 1:
        return out
    return out * mask[:, -rows:, None, None].to(out.dtype)
