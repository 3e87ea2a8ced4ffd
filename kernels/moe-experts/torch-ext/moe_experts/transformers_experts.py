"""`moe_experts` for an experts module of Transformers, whatever its layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .op import moe_experts


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """To use it in a model:

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
        activation=getattr(self, "act_fn", "silu"),
        gate=self._apply_gate if self.has_gate else None,
        transposed=self.is_transposed,
        gate_up_bias=getattr(self, first + "_bias") if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        output_norm=self.post_expert_norm if self.has_post_expert_norm else None,
    )
