"""Layers for `kernels.kernelize`: a forward each, which borrows weight and epsilon from the layer it is put into.

Their attributes are those of that layer, which no type checker can know.
"""

from __future__ import annotations

import torch
from torch import nn

from .op import rms_norm


class RMSNorm(nn.Module):
    """Llama's order, as in LlamaRMSNorm, Qwen3MoeRMSNorm, MistralRMSNorm: round, then multiply by weight."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        eps = getattr(self, "variance_epsilon", None)
        return rms_norm(hidden_states, self.weight, self.eps if eps is None else eps)  # pyrefly: ignore


class RMSNormZeroCentered(nn.Module):
    """Gemma's order, as in GemmaRMSNorm to Gemma3RMSNorm: multiply by 1 + weight in float32, then round."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=True)  # pyrefly: ignore


class RMSNormFloat32Scale(nn.Module):
    """As Gemma4RMSNorm and torch.nn.RMSNorm: multiply by weight, if there is one, in float32, then round."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, getattr(self, "weight", None), self.eps, float32_scale=True)  # pyrefly: ignore
