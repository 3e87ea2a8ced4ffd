"""Put Hub kernels into the layers of a model, see what runs where, and take them out again.

kernelize(model)     swap RMSNorm, experts, router and attention layers of this model only; returns a Report
explain(model)       one line per layer: which kernel, version and path, or why it was left alone
unkernelize(model)   the model as it was before
quantize_experts(model, "int8")   weights of experts in a byte or half a byte each; returns a QuantizationReport
register()           experts_implementation="pallas" for Transformers (done by `import pallas_hub`)

Importing this package imports neither torch nor Transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_hub.layers.errors import (
        NothingQuantizedWarning,
        NothingSwapped,
        NothingSwappedWarning,
        VerificationError,
    )
    from pallas_hub.layers.interface import register, register_when_imported
    from pallas_hub.layers.loading import use_loader
    from pallas_hub.layers.quantize import QuantizationReport, QuantizedLayer, quantize_experts
    from pallas_hub.layers.report import LayerReport, Report
    from pallas_hub.layers.repository import PallasLayerRepository
    from pallas_hub.layers.swap import explain, kernelize, unkernelize

__all__ = [
    "LayerReport",
    "NothingQuantizedWarning",
    "NothingSwapped",
    "NothingSwappedWarning",
    "PallasLayerRepository",
    "QuantizationReport",
    "QuantizedLayer",
    "Report",
    "VerificationError",
    "explain",
    "kernelize",
    "quantize_experts",
    "register",
    "register_when_imported",
    "unkernelize",
    "use_loader",
]

# Public name -> the file that defines it; imported on first use, since most of them need torch.
_HOMES = {
    "LayerReport": "report",
    "NothingQuantizedWarning": "errors",
    "NothingSwapped": "errors",
    "NothingSwappedWarning": "errors",
    "PallasLayerRepository": "repository",
    "QuantizationReport": "quantize",
    "QuantizedLayer": "quantize",
    "Report": "report",
    "VerificationError": "errors",
    "explain": "swap",
    "kernelize": "swap",
    "quantize_experts": "quantize",
    "register": "interface",
    "register_when_imported": "interface",
    "unkernelize": "swap",
    "use_loader": "loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pallas_hub.layers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pallas_hub.layers' has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
