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
        return rms_norm(hidden_states, _weight(self), _epsilon(self))  # pyrefly: ignore


class RMSNormZeroCentered(nn.Module):
    """Gemma's order, as in GemmaRMSNorm to Gemma3RMSNorm: multiply by 1 + weight in float32, then round."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, _weight(self), _epsilon(self), zero_centered=True)  # pyrefly: ignore


class RMSNormFloat32Scale(nn.Module):
    """As Gemma4RMSNorm and torch.nn.RMSNorm: multiply by weight, if there is one, in float32, then round."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, _weight(self), _epsilon(self), float32_scale=True)  # pyrefly: ignore


# Both look where nn.Module keeps things before they ask it: its __getattr__ takes a microsecond to find a weight, and
# longer to say no, out of ten for a short row.


def _weight(layer):
    weight = layer._parameters.get("weight")
    return getattr(layer, "weight", None) if weight is None else weight


def _epsilon(layer):
    """Llama and its relatives call it variance_epsilon, Gemma and torch.nn.RMSNorm eps."""
    values = layer.__dict__
    if "variance_epsilon" in values:
        return values["variance_epsilon"]
    return layer.eps
