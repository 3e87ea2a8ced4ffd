"""Scale a tensor: the smallest kernel that the registry's tests need."""

from . import layers
from .op import scale

__all__ = ["layers", "scale"]
