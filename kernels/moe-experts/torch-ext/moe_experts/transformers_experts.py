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
    """
    first = "gate_up_proj" if self.has_gate else "up_proj"
    tensors = (
        hidden_states,
        getattr(self, first),
        self.down_proj,
        top_k_index,
        top_k_weights,
        getattr(self, first + "_bias") if self.has_bias else None,
        self.down_proj_bias if self.has_bias else None,
    )
    # As torch code the layer runs the module's own functions: what they compute, to the last bit.
    fused = not self.has_post_expert_norm and runs_fused(*tensors)
    activation, gate, limit = names_of(self) if fused else functions_of(self)
    *arguments, gate_up_bias, down_bias = tensors
    return moe_experts(
        *arguments,
        activation=activation,
        gate=gate,
        limit=limit,
        transposed=self.is_transposed,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        output_norm=self.post_expert_norm if self.has_post_expert_norm else None,
    )
