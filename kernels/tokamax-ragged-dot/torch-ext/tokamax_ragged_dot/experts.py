"""The experts layer of ragged-dot with Tokamax's product in it: same arguments, same checks, same torch code around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._ragged_dot import moe
from ._ragged_dot.checks import autocast_dtype, check_gated
from ._tokamax import Rule, check
from .op import ragged_dot, ragged_dot_transposed


def moe_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    activation: str | Callable[[Tensor], Tensor] = "silu",
    gate: str | Callable[[Tensor], Tensor] | None = "concatenated",
    transposed: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    output_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Send each token through its top_k experts and sum the results, weighted; arguments as ragged-dot's moe_experts.

    Shapes   hidden_states (t, h), gate_up_proj (e, 2 * i, h), down_proj (e, h, i), top_k_index and top_k_weights
             (t, top_k), gate_up_bias (e, 2 * i), down_bias (e, h)  ->  (t, h); i in place of 2 * i without a gate
    Dtypes   float32, bfloat16, float16, one for hidden_states and weights; top_k_weights any float
    Grads    hidden_states, all weights and biases, top_k_weights; first order
    Raises   ValueError: shapes that do not match, on CPU an index outside 0 ... e.  TypeError: unsupported dtypes.
             ImportError: no tokamax
    Source   the experts of Transformers (transformers.integrations.moe)
    """
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    moe._check_names(activation, gate)
    moe._check(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, biases, gate is not None, transposed)
    check("moe_experts", (Rule("hidden_states", ("t", "h")),), (hidden_states,))  # ragged-dot takes float64 too
    experts, top_k = gate_up_proj.shape[0], top_k_index.shape[1]
    order, ids, group_sizes = moe._sort_by_expert(top_k_index, experts)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = _product(x, weight, group_sizes, not transposed)
        return y if bias is None else y + bias.index_select(0, ids.clamp(max=experts - 1))

    x = linear(hidden_states.index_select(0, order // top_k), gate_up_proj, gate_up_bias)
    gated = moe._apply_gate(x, activation, gate)  # (s, i)
    check_gated("moe_experts", gated, x.shape[0], down_proj.shape[1 if transposed else 2], gate)
    x = linear(gated.to(autocast_dtype(hidden_states) or hidden_states.dtype), down_proj, down_bias)
    if output_norm is not None:
        x = output_norm(x)
    served = ids < experts  # slots that another rank serves come last; a bias or a norm may have filled their rows
    x = torch.where(served.unsqueeze(-1), x, 0)
    weights = torch.where(top_k_index < experts, top_k_weights, 0)
    return moe._combine(x, order, weights, hidden_states.dtype)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`moe_experts` for an experts module of Transformers, whatever its layout; for ALL_EXPERTS_FUNCTIONS."""
    first = "gate_up_proj" if self.has_gate else "up_proj"
    return moe_experts(
        hidden_states,
        getattr(self, first),
        self.down_proj,
        top_k_index,
        top_k_weights,
        activation=getattr(self, "act_fn", "silu"),  # unused where _apply_gate brings its own
        gate=self._apply_gate if self.has_gate else None,
        transposed=self.is_transposed,
        gate_up_bias=getattr(self, first + "_bias") if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        output_norm=self.post_expert_norm if self.has_post_expert_norm else None,
    )


def _product(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, transposed: bool) -> Tensor:
    """Under autocast both factors are taken in its dtype, as torch's own products take them."""
    dtype = autocast_dtype(lhs)
    if dtype is not None:
        lhs, rhs = lhs.to(dtype), rhs.to(dtype)
    return (ragged_dot_transposed if transposed else ragged_dot)(lhs, rhs, group_sizes)
