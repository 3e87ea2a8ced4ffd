"""Versioned Pallas kernels for PyTorch.

get_kernel("pallas-hub/rms-norm")   a kernel repo from the Hub, the cache, or the copy that comes with this package
kernelize(model)                    RMSNorm layers and experts of a model run Hub kernels from now on
explain(model)                      which layer runs which kernel, or why it was left alone
unkernelize(model)                  as before
quantize_experts(model, "int8")     experts in one byte a weight, or half of one, in place

Importing this package loads neither JAX nor Transformers and opens no connection.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pallas_hub.layers import diffusers_backend, interface

if TYPE_CHECKING:
    from pallas_hub.layers import explain, kernelize, quantize_experts, unkernelize
    from pallas_hub.registry import get_kernel, has_kernel, list_kernels, loaded_from
    from pallas_hub.registry.errors import PallasHubError

__version__ = "0.1.0"
__all__ = [
    "PallasHubError",
    "explain",
    "get_kernel",
    "has_kernel",
    "kernelize",
    "list_kernels",
    "loaded_from",
    "quantize_experts",
    "unkernelize",
]

# Public name -> where it lives. Resolved on first use (PEP 562) to keep `import pallas_hub` light.
_HOMES = {
    "PallasHubError": "pallas_hub.registry.errors",
    "get_kernel": "pallas_hub.registry",
    "has_kernel": "pallas_hub.registry",
    "list_kernels": "pallas_hub.registry",
    "loaded_from": "pallas_hub.registry",
    "kernelize": "pallas_hub.layers",
    "explain": "pallas_hub.layers",
    "quantize_experts": "pallas_hub.layers",
    "unkernelize": "pallas_hub.layers",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pallas_hub' has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


# Transformers checks `experts_implementation="pallas"` against a table, and Diffusers set_attention_backend("pallas").
# The entries are made when these tables are imported.
interface.register_when_imported()
diffusers_backend.register_when_imported()
