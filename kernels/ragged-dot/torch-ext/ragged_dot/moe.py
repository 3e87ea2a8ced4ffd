"""A whole experts layer: route, gather, gate and up product, activation, down product, weighting, sum per token.

Everything but the two ragged dots is plain torch, differentiable as it stands and free of data-dependent shapes, so the
layer traces, exports and checkpoints like any other torch code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import (
    autocast_dtype,
    check_gated,
    check_layer,
    check_one_device,
    check_top_k_index,
    check_whole_numbers,
    dtype_text,
    shape_text,
)
from .op import product

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


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
    """Send each token through its top_k experts and sum the results, weighted.

    activation   a name (silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh) or a function of a tensor
    gate         how gate and up lie in the first product: "concatenated" [gate, up], "interleaved" [gate0, up0, ...],
                 None for experts without a gate; or a function (s, 2 * i) -> (s, i) in place of activation(gate) * up
    transposed   weights are (e, in, out) instead of (e, out, in)
    output_norm  a function applied to each expert's output before weighting
    A top_k_index of e marks a slot that no expert here serves: it adds nothing, and its weight's gradient is zero.

    Shapes   hidden_states (t, h), gate_up_proj (e, 2 * i, h), down_proj (e, h, i), top_k_index and top_k_weights
             (t, top_k), gate_up_bias (e, 2 * i), down_bias (e, h)  ->  (t, h); i in place of 2 * i without a gate
    Dtypes   as ragged_dot, one for hidden_states and weights; top_k_weights any float; result in hidden_states.dtype
    Grads    hidden_states, all weights and biases, top_k_weights; an expert without tokens gets exactly zero
    Raises   ValueError: shapes that do not match, on CPU an index outside 0 ... e.  TypeError: unsupported dtypes
    Source   the experts of Transformers (transformers.integrations.moe)
    """
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    _check_names(activation, gate)
    _check(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, biases, gate is not None, transposed)
    experts, top_k = gate_up_proj.shape[0], top_k_index.shape[1]
    order, ids, group_sizes = _sort_by_expert(top_k_index, experts)

    x = hidden_states.index_select(0, order // top_k)  # (s, h): one row per served slot, in the order of experts
    x = _linear(x, gate_up_proj, gate_up_bias, ids, group_sizes, transposed)
    gated = _apply_gate(x, activation, gate)  # (s, i)
    check_gated("moe_experts", gated, x.shape[0], down_proj.shape[1 if transposed else 2], gate)
    gated = gated.to(autocast_dtype(hidden_states) or hidden_states.dtype)  # a gate or a bias may have made it wider
    x = _linear(gated, down_proj, down_bias, ids, group_sizes, transposed)
    if output_norm is not None:
        x = output_norm(x)
    # Rows of slots without an expert are zero, unless something was added to them.
    if down_bias is not None or output_norm is not None:
        x = torch.where((ids < experts).unsqueeze(-1), x, 0)
    # Their weights must not count either, not even as NaN.
    weights = torch.where(top_k_index < experts, top_k_weights, 0)
    return _combine(x, order, weights, hidden_states.dtype)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`moe_experts` for an experts module of Transformers, whatever its layout. To use it in a model:

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    ALL_EXPERTS_FUNCTIONS.register("pallas", experts_forward)
    model.set_experts_implementation("pallas")
    """
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


def _sort_by_expert(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The slots in the order of their experts, each one's expert, and how many each expert got. Unserved slots last."""
    flat = top_k_index.reshape(-1)  # (s,) with s = t * top_k
    ids, order = torch.sort(flat, stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=flat.device)
    counts = counts.scatter_add(0, flat.long(), torch.ones_like(flat, dtype=torch.int32))
    return order, ids, counts[:experts]


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, group_sizes: Tensor, transposed: bool
) -> Tensor:
    y = product(x, weight, group_sizes, not transposed)
    if bias is None or bias.shape[0] == 0:
        return y
    # Any bias will do for unserved slots: the next product, or the weighting, drops those rows. Under autocast a
    # float32 bias is added as it is, and what is made of the sum keeps its digits until the next product.
    return y + bias.index_select(0, ids.clamp(max=bias.shape[0] - 1))


def _apply_gate(x: Tensor, activation: str | Callable, gate: str | Callable | None) -> Tensor:
    if callable(gate):
        return gate(x)
    act = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    if gate is None:
        return act(x)
    gates, ups = x.chunk(2, dim=-1) if gate == "concatenated" else (x[..., ::2], x[..., 1::2])
    return act(gates) * ups


def _combine(x: Tensor, order: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring the slots back to their tokens and sum them there, weighted: (s, h), (s,), (t, top_k) -> (t, h)."""
    t, top_k = weights.shape
    back = torch.empty_like(order).scatter(0, order, torch.arange(t * top_k, device=order.device))
    weighted = x.index_select(0, back).view(t, top_k, x.shape[1]) * weights.unsqueeze(-1)
    # One rounding at the end: autocast makes narrow rows of wide hidden states, and wide weights make wide rows.
    return weighted.sum(dim=1, dtype=torch.promote_types(weighted.dtype, dtype)).to(dtype)


def _check_names(activation: str | Callable, gate: str | Callable | None) -> None:
    if not callable(activation) and activation not in ACTIVATIONS:
        raise ValueError(
            f'moe_experts: activation must be a function or one of {", ".join(ACTIVATIONS)}; got "{activation}".'
        )
    if not callable(gate) and gate not in ("concatenated", "interleaved", None):
        raise ValueError(f'moe_experts: gate must be "concatenated", "interleaved", None or a function; got "{gate}".')


def _check(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    biases: dict[str, Tensor | None],
    gated: bool,
    transposed: bool,
) -> None:
    op = "moe_experts"
    tensors = {"hidden_states": hidden_states, "gate_up_proj": gate_up_proj, "down_proj": down_proj}
    needed = {**tensors, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    for name, tensor in needed.items():
        if tensor is None:  # which check_one_device takes for a bias left out
            raise TypeError(
                f"{op}: {name} must be a tensor; got None. Only gate_up_bias and down_bias may be left out."
            )
    check_one_device(op, {**needed, **biases})
    t = hidden_states.shape[0] if hidden_states.dim() else 0
    e, h, i = check_layer(op, tensors, gated, transposed)
    if top_k_index.dim() != 2 or top_k_index.shape[0] != t:
        raise ValueError(
            f"{op}: top_k_index must be (t, top_k) = ({t}, top_k) to match hidden_states (t, h) = ({t}, {h}); "
            f"got {shape_text(top_k_index)}."
        )
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"{op}: top_k_weights must be (t, top_k) = {shape_text(top_k_index)} to match top_k_index; "
            f"got {shape_text(top_k_weights)}."
        )
    check_whole_numbers(op, "top_k_index", top_k_index)
    if not top_k_weights.is_floating_point():
        raise TypeError(f"{op}: top_k_weights is {dtype_text(top_k_weights)}; it must be a float dtype.")
    for (name, bias), width, letters in zip(biases.items(), (i, h), ("2 * i" if gated else "i", "h"), strict=True):
        if bias is not None and bias.shape != (e, width):
            raise ValueError(f"{op}: {name} must be (e, {letters}) = ({e}, {width}); got {shape_text(bias)}.")
    check_top_k_index(op, top_k_index, e)
