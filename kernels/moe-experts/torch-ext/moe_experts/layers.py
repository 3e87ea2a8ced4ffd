"""Layers for `kernels.kernelize`: a forward each, which borrows weights and settings from the layer it is put into.

Experts have none: Transformers swaps them by ALL_EXPERTS_FUNCTIONS, not by layer names; see transformers_experts.py.
The one layer name of Transformers that covers experts, MegaBlocksMoeMLP of gpt-oss, includes the router. Its experts go
through the same function, so the block runs this kernel without a layer of its own.
"""

from __future__ import annotations

import torch
from torch import nn

from .router import router_topk, runs_as_torch


class SoftmaxTopKRouter(nn.Module):
    """All routers that Transformers gives this name: Qwen3_5MoeTopKRouter, and LagunaTopKRouter, which takes a sigmoid.

    A module with e_score_correction_bias is of the second kind. Its attributes no type checker can know.
    Where no kernel runs, the module's own forward does: the same operations, and not one call more.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if runs_as_torch(hidden_states):
            return type(self).forward(self, hidden_states)  # of the class that borrowed this forward
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)  # pyrefly: ignore
        logits = nn.functional.linear(hidden_states, self.weight)  # pyrefly: ignore
        bias = getattr(self, "e_score_correction_bias", None)
        if bias is None:
            weights, index = router_topk(logits, self.top_k, renormalize=True)  # pyrefly: ignore
            return logits, weights, index
        logits, limit = logits.float(), self.router_logit_softcapping
        if limit > 0.0:  # pyrefly: ignore
            logits = torch.tanh(logits / limit) * limit  # pyrefly: ignore
        weights, index = router_topk(logits, self.top_k, score="sigmoid", renormalize=True, bias=bias)  # pyrefly: ignore
        return logits, weights.to(hidden_states.dtype), index
