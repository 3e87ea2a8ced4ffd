"""The layer as two ragged dots with torch code around them: on CPU and CUDA, for gradients, and for any gate.

What it computes between the products is here; the products and all else are ragged-dot's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._ragged_dot.moe import ACTIVATIONS
from ._ragged_dot.moe import moe_experts as _moe_experts

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
    activation: Activation,
    gate: Gate,
    limit: float | None,
    transposed: bool,
    output_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    if isinstance(gate, str) and (limit is not None or activation == "swiglu_oss"):
        gate, activation = gate_function(activation, gate, limit), "silu"
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


def run(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
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
