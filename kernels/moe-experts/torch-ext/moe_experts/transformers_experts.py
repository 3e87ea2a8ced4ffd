"""`moe_experts` for an experts module of Transformers, whatever its layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .op import moe_experts, runs_fused
from .recognise import functions_of, names_of


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """To use it in a model:

    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    ALL_EXPERTS_FUNCTIONS.register("pallas", experts_forward)
    model.set_experts_implementation("pallas")

    A module with gate_up_data, gate_up_scale, down_data and down_scale in place of its weights runs with these,
    quantised as quantized.py describes and always (e, in, out).
    """
    first = "gate_up_proj" if self.has_gate else "up_proj"
    quantized = hasattr(self, "gate_up_scale")
    weights = (self.gate_up_data, self.down_data) if quantized else (getattr(self, first), self.down_proj)
    biases = (getattr(self, first + "_bias"), self.down_proj_bias) if self.has_bias else (None, None)
    scales = (self.gate_up_scale, self.down_scale) if quantized else (None, None)
    # As torch code the layer runs the module's own functions: what they compute, to the last bit.
    fused = not self.has_post_expert_norm and runs_fused(
        hidden_states, *weights, top_k_index, top_k_weights, *biases, *scales
    )
    activation, gate, limit = names_of(self) if fused else functions_of(self)
    return moe_experts(
        hidden_states,
        *weights,
        top_k_index,
        top_k_weights,
        activation=activation,
        gate=gate,
        limit=limit,
        transposed=quantized or self.is_transposed,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        gate_up_scale=scales[0],
        down_scale=scales[1],
        output_norm=self.post_expert_norm if self.has_post_expert_norm else None,
    )
