"""The layer as two ragged dots with torch code around them: on CPU and CUDA, for gradients, and for any gate.

What it computes between the products is here; the products and all else are ragged-dot's own. With quantised weights
the products are those of quantized_dot.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._ragged_dot.checks import autocast_dtype, check_gated
from ._ragged_dot.moe import ACTIVATIONS, _apply_gate, _combine, _sort_by_expert
from ._ragged_dot.moe import moe_experts as _moe_experts
from .quantized_dot import quantized_dot

Activation = str | Callable[[Tensor], Tensor]
Gate = str | Callable[[Tensor], Tensor] | None
OSS_ALPHA = 1.702


def compose(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    activation: Activation,
    gate: Gate,
    limit: float | None,
    transposed: bool,
    output_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    if isinstance(gate, str) and (limit is not None or activation == "swiglu_oss"):
        gate, activation = gate_function(activation, gate, limit), "silu"
    if gate_up_scale is not None and down_scale is not None:
        first, second = (gate_up_proj, gate_up_scale, gate_up_bias), (down_proj, down_scale, down_bias)
        return _quantized(hidden_states, first, second, top_k_index, top_k_weights, activation, gate, output_norm)
    return _moe_experts(
        hidden_states,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        activation=activation,
        gate=gate,
        transposed=transposed,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        output_norm=output_norm,
    )


def _quantized(
    hidden_states: Tensor,
    first: tuple[Tensor, Tensor, Tensor | None],
    second: tuple[Tensor, Tensor, Tensor | None],
    top_k_index: Tensor,
    top_k_weights: Tensor,
    activation: Activation,
    gate: Gate,
    output_norm: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """The same steps as in _ragged_dot/moe.py. `first` and `second` are data, scale and bias; all was checked."""
    (experts, _, width), top_k = first[0].shape, top_k_index.shape[1]
    order, ids, group_sizes = _sort_by_expert(top_k_index, experts)

    def linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        y = quantized_dot(x, data, scale, group_sizes)
        return y if bias is None or not experts else y + bias.index_select(0, ids.clamp(max=experts - 1))

    x = hidden_states.index_select(0, order // top_k)  # (s, h): one row per served slot, in the order of experts
    gated = _apply_gate(linear(x, *first), activation, gate)  # (s, i)
    check_gated("moe_experts", gated, x.shape[0], width // (1 if gate is None else 2), gate)
    x = linear(gated.to(autocast_dtype(hidden_states) or hidden_states.dtype), *second)
    if output_norm is not None:
        x = output_norm(x)
    # What a bias or the norm made of slots without an expert must not count, nor their weights, not even as NaN.
    x = torch.where((ids < experts).unsqueeze(-1), x, 0)
    return _combine(x, order, torch.where(top_k_index < experts, top_k_weights, 0), hidden_states.dtype)


def run(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    activation: str = "silu",
    gate: str = "concatenated",
    limit: float | None = None,
    transposed: bool = False,
) -> Tensor:
    """The fused op in torch; "none" stands for no gate."""
    return compose(
        hidden_states,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        gate_up_bias,
        down_bias,
        gate_up_scale,
        down_scale,
        activation,
        None if gate == "none" else gate,
        limit,
        transposed,
    )


def gate_function(activation: Activation, gate: str | None, limit: float | None) -> Callable[[Tensor], Tensor]:
    """What these names compute, (s, 2 * i) -> (s, i), or (s, i) -> (s, i) without a gate."""
    if gate is None:
        return activation if callable(activation) else ACTIVATIONS[activation]

    def apply(product: Tensor) -> Tensor:
        gates, ups = product.chunk(2, dim=-1) if gate == "concatenated" else (product[..., ::2], product[..., 1::2])
        if limit is not None:
            gates, ups = gates.clamp(max=limit), ups.clamp(min=-limit, max=limit)
        if activation == "swiglu_oss":
            return (ups + 1) * (gates * torch.sigmoid(gates * OSS_ALPHA))
        activate = activation if callable(activation) else ACTIVATIONS[activation]
        return activate(gates) * ups

    return apply
