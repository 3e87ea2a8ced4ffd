"""Flash attention in the call forms of flash-attn and of torch: Pallas kernels on TPU, torch code elsewhere."""

from . import layers
from .cache import flash_attn_with_kvcache
from .op import flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention
from .paged_cache import PagedKVCache
from .paged_op import paged_attention

__all__ = [
    "PagedKVCache",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "layers",
    "paged_attention",
    "scaled_dot_product_attention",
]
