"""Tokamax's ragged dot for PyTorch, and experts layers with it: a rival of ragged-dot with the same API."""

from . import layers
from .experts import experts_forward, moe_experts
from .op import ragged_dot, ragged_dot_transposed

__all__ = ["experts_forward", "layers", "moe_experts", "ragged_dot", "ragged_dot_transposed"]
