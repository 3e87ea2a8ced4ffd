"""The public experts layer: one fused op where a Pallas kernel runs and nothing needs a gradient, else torch code.

Training keeps what lies between the products anyway, so there the layer is the composition in _ragged_dot/moe.py: two
ragged dots with gradients of any order, and plain torch around them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import torch_path
from ._bridge import Lazy, jax_op
from ._ragged_dot.checks import autocast_dtype
from ._ragged_dot.moe import _check as check_arguments
from .checks import check_names, check_quantized, check_tensors, is_quantized
from .torch_path import Activation, Gate

_FUSED_DTYPES = (torch.float32, torch.bfloat16)

_fused = jax_op(
    "moe_experts",
    namespace=__package__,
    fn=Lazy(".kernel:moe_experts_forward", __package__),
    torch_fn=torch_path.run,
    shape_fn=Lazy(".shapes:moe_experts", __package__),
)


def moe_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    activation: Activation = "silu",
    gate: Gate = "concatenated",
    limit: float | None = None,
    transposed: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    output_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Send each token through its top_k experts and sum the results, weighted.

    activation   a name (silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh, swiglu_oss) or a function of a tensor.
                 swiglu_oss is gpt-oss' own: (up + 1) * gate * sigmoid(1.702 * gate)
    gate         how gate and up lie in the first product: "concatenated" [gate, up], "interleaved" [gate0, up0, ...],
                 None for experts without a gate; or a function (s, 2 * i) -> (s, i) in place of activation(gate) * up
    limit        cuts gate at `limit` and up to -limit ... limit, before the activation
    transposed   weights are (e, in, out) instead of (e, out, in)
    scales       both or none: weights are quantised, int8, float8_e4m3fn or uint8 (two values of four bits), as
                 quantized.py describes; transposed must be True
    output_norm  a function applied to each expert's output before weighting
    A top_k_index of e marks a slot that no expert here serves: it adds nothing, and its weight's gradient is zero.
    Functions instead of names, float16 and a needed gradient run as two ragged dots with torch code around them.

    Shapes   hidden_states (t, h), gate_up_proj (e, 2 * i, h), down_proj (e, h, i), top_k_index and top_k_weights
             (t, top_k), gate_up_bias (e, 2 * i), down_bias (e, h)  ->  (t, h); i in place of 2 * i without a gate.
             Scales (e, a, b): one for ceil(in / a) rows and ceil(out / b) columns
    Dtypes   float32, bfloat16, float16, float64 (not on TPU), one for hidden_states and weights; top_k_weights any
             float; scales float32; result in hidden_states.dtype. Sums in float32 (float64 for float64)
    Grads    hidden_states, all weights and biases, top_k_weights; an expert without tokens gets exactly zero.
             Quantised weights and their scales have none
    Raises   ValueError: shapes that do not match, on CPU an index outside 0 ... e.  TypeError: unsupported dtypes
    Source   the experts of Transformers (transformers.integrations.moe)
    """
    check_names(activation, gate, limit)
    weights, scales = (gate_up_proj, down_proj), (gate_up_scale, down_scale)
    tensors = (hidden_states, *weights, top_k_index, top_k_weights, gate_up_bias, down_bias, *scales)
    check_tensors(tensors)
    quantized = is_quantized(*weights, *scales)
    stand_for = check_quantized(tensors, gate is not None, transposed) if quantized else weights
    fused = not (callable(activation) or callable(gate) or output_norm) and runs_fused(*tensors)
    if fused or quantized:  # else ragged-dot's own layer checks them
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        check_arguments(hidden_states, *stand_for, top_k_index, top_k_weights, biases, gate is not None, transposed)
    if not fused:
        return torch_path.compose(*tensors, activation, gate, limit, transposed, output_norm)
    gate_up_bias, down_bias = _both_or_none(*stand_for, gate_up_bias, down_bias, transposed)
    if top_k_weights.dtype == torch.float64:  # which JAX doesn't take; they count as float32 anyway
        top_k_weights = top_k_weights.float()
    layer = (hidden_states, *weights, top_k_index, top_k_weights, gate_up_bias, down_bias, *scales)
    return _fused(*layer, activation, gate or "none", limit, transposed)


def runs_fused(hidden_states: Tensor, *others: Tensor | None) -> bool:
    """Whether a call with these tensors takes the fused op, provided that all it is given has a name."""
    if hidden_states.dtype not in _FUSED_DTYPES or autocast_dtype(hidden_states) is not None:
        return False
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden_states, *others)
    ):
        return False
    if hidden_states.device.type == "tpu":
        return True
    return not torch.compiler.is_compiling() and _fused.path_for(hidden_states) != "torch"


def _both_or_none(
    gate_up_proj: Tensor, down_proj: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The kernel takes both biases or none: one alone gets zeros at its side."""
    if (gate_up_bias is None) == (down_bias is None):
        return gate_up_bias, down_bias
    out = 2 if transposed else 1
    if gate_up_bias is None:
        return gate_up_proj.new_zeros(gate_up_proj.shape[0], gate_up_proj.shape[out]), down_bias
    return gate_up_bias, down_proj.new_zeros(down_proj.shape[0], down_proj.shape[out])
