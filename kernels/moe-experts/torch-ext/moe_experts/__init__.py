"""Mixture-of-experts layers as one op: a fused Pallas kernel on TPU, tuned torch code on CPU, one API for both."""

from . import layers
from .op import moe_experts
from .quantized import FORMATS, dequantize, quantize
from .router import router_topk
from .transformers_experts import experts_forward

__all__ = ["FORMATS", "dequantize", "experts_forward", "layers", "moe_experts", "quantize", "router_topk"]
