"""RMSNorm over the last axis, forward and backward, for TPU (Pallas) and, in torch, for CPU and CUDA."""

from . import layers
from .op import rms_norm

__all__ = ["layers", "rms_norm"]
