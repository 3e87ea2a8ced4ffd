"""Ragged dot and mixture-of-experts layers: a Pallas kernel on TPU, tuned torch code on CPU, one API for both."""

from . import layers
from .moe import experts_forward, moe_experts
from .op import grouped_mm, ragged_dot

__all__ = ["experts_forward", "grouped_mm", "layers", "moe_experts", "ragged_dot"]
