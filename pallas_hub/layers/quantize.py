"""quantize_experts: weights of experts in a byte or half a byte each, and the kernel that reads them so."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pallas_hub.layers import experts, state
from pallas_hub.layers.errors import NothingQuantizedWarning
from pallas_hub.layers.loading import DEFAULT_REPOS, EXPERTS, Kernel, load_kernel
from pallas_hub.layers.quantized_experts import QuantizedExperts, quantized_class


@dataclass
class QuantizedLayer:
    """One layer of experts."""

    path: str  # as in model.named_modules(); "" is the model itself
    original: str  # class of the layer before
    format: str | None = None  # of its weights now; None: floats
    reason: str | None = None  # why it was left alone
    bytes_before: int = 0  # of its weights, without biases
    bytes_after: int = 0
    rms_error: float | None = None  # root of the sum of squared differences, over that of squared weights
    max_error: float | None = None  # largest difference, over the largest weight

    def __str__(self) -> str:
        name = f"{self.path or '(model)'}  {self.original}"
        if self.reason is not None:
            return f"{name}  not quantised: {self.reason}"
        return (
            f"{name}  {self.format}, {_size(self.bytes_before)} -> {_size(self.bytes_after)}, "
            f"error rms {self.rms_error:.1e}, max {self.max_error:.1e}"
        )


@dataclass
class QuantizationReport:
    """The layers in the order of model.named_modules()."""

    model: str
    format: str
    layers: list[QuantizedLayer] = field(default_factory=list)

    @property
    def quantized(self) -> list[QuantizedLayer]:
        return [layer for layer in self.layers if layer.reason is None]

    @property
    def left_alone(self) -> list[QuantizedLayer]:
        return [layer for layer in self.layers if layer.reason is not None]

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.quantized)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.quantized)

    def to_dict(self) -> dict:
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        layers = [asdict(layer) for layer in self.layers]
        return {"model": self.model, "format": self.format, **totals, "layers": layers}

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __iter__(self) -> Iterator[QuantizedLayer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, path: str) -> QuantizedLayer:
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise KeyError(path)

    def __str__(self) -> str:
        text = f"{self.model}: experts of {len(self.quantized)} of {len(self.layers)} layers quantised to {self.format}"
        if self.quantized:
            text += f", {_size(self.bytes_before)} -> {_size(self.bytes_after)}"
        return "\n".join([text, *(f"  {layer}" for layer in self.layers)])


def quantize_experts(model: nn.Module, format: str = "int8") -> QuantizationReport:
    """Quantise the weights of all experts of `model`, in place, and let them run the kernel pallas-hub/moe-experts.

    The float weights are freed, and there is no way back to them. Routers, biases and all other layers stay as they
    are. The weights are frozen from now on; gradients pass through, as training an adapter needs.

    format   int8         one scale per expert and output
             fp8          float8_e4m3fn, the same
             fp8-tensor   one scale per expert
             fp8-block    one scale per block of 128 x 128
             int4         one scale per expert, output and 128 inputs; int4-g64, int4-g32: per 64, 32
    Returns a report: size and error of every layer, and why a layer was left alone.
    Raises   ValueError: an unknown format; a weight that holds NaN or infinity (the model is as before)
    """
    kernel = _load_kernel()
    if format not in kernel.module.FORMATS:
        raise ValueError(f'quantize_experts: format must be one of {", ".join(kernel.module.FORMATS)}; got "{format}".')
    report, chosen = QuantizationReport(type(model).__name__, format), []
    for path, module in model.named_modules():
        if experts.is_experts(module):
            layer = QuantizedLayer(path, type(module).__name__, format, _why_not(module, kernel))
            report.layers.append(layer)
            if layer.reason is None:
                _check_finite(path, module)
                chosen.append((layer, module))
            else:
                layer.format = module.quantization_format if isinstance(module, QuantizedExperts) else None
    for layer, module in chosen:
        _quantize(layer, module, kernel)
    if not report.quantized and not any(layer.format for layer in report.layers):
        _nothing_quantized(report)
    return report


def _load_kernel() -> Kernel:
    kernel = load_kernel(DEFAULT_REPOS[EXPERTS])
    missing = [name for name in ("FORMATS", "quantize", "dequantize") if not hasattr(kernel.module, name)]
    if missing:
        raise ValueError(
            f"quantize_experts: kernel {kernel.repo_id} from {kernel.source} must have FORMATS, quantize and "
            f"dequantize; {', '.join(missing)} not found. It is older than quantised experts: get a newer one."
        )
    return kernel


def _why_not(module: nn.Module, kernel: Kernel) -> str | None:
    if isinstance(module, QuantizedExperts):
        return f"it is already, to {module.quantization_format}; its float weights are gone"
    return experts.recognise(module) or experts.probe(module, kernel)


def _check_finite(path: str, module: Any) -> None:
    for name in experts.weight_names(module)[:2]:
        for number, weight in enumerate(module._parameters[name]):
            if not weight.detach().isfinite().all():
                raise ValueError(
                    f"quantize_experts: weights must be finite; {path or type(module).__name__}.{name} holds NaN or "
                    f"infinity in expert {number}. Nothing was quantised."
                )


def _quantize(layer: QuantizedLayer, module: Any, kernel: Kernel) -> None:
    errors, sizes = _Sums(), _Sums()
    for name, buffer in zip(experts.weight_names(module)[:2], ("gate_up", "down"), strict=True):
        weight = module._parameters[name].detach()
        weight = weight if module.is_transposed else weight.mT  # (e, in, out)
        data, scale = kernel.module.quantize(weight, layer.format)
        _compare(weight, data, scale, kernel, errors, sizes)
        layer.bytes_before += weight.nbytes
        layer.bytes_after += data.nbytes + scale.nbytes
        del module._parameters[name], weight
        module.register_buffer(f"{buffer}_data", data)
        module.register_buffer(f"{buffer}_scale", scale)
    layer.rms_error, layer.max_error = errors.root / (sizes.root or 1.0), errors.largest / (sizes.largest or 1.0)
    module.quantization_format = layer.format
    module.__class__ = quantized_class(type(module), kernel)
    record = state.record_of(module)
    if record is not None:  # of kernelize: its kernel runs here no longer
        record.kernel = record.layer = record.implementation = None


def _compare(weight: Tensor, data: Tensor, scale: Tensor, kernel: Kernel, errors: _Sums, sizes: _Sums) -> None:
    """One expert at a time: a float32 copy of all would be as large as the float model."""
    for expert, *quantized in zip(weight, data.split(1), scale.split(1), strict=True):
        sizes.add(expert.float())
        errors.add(kernel.module.dequantize(*quantized, expert.shape[0])[0].sub_(expert))


class _Sums:
    def __init__(self) -> None:
        self.squares = self.largest = 0.0

    def add(self, numbers: Tensor) -> None:
        if numbers.numel():
            self.squares += torch.linalg.vector_norm(numbers).item() ** 2
            self.largest = max(self.largest, numbers.abs().max().item())

    @property
    def root(self) -> float:
        return self.squares**0.5


def _nothing_quantized(report: QuantizationReport) -> None:
    if not report.layers:
        text = f"quantize_experts: {report.model} has no experts; nothing was quantised."
    else:
        first = report.layers[0]
        text = (
            f"quantize_experts: none of the {len(report.layers)} layers of experts of {report.model} was quantised. "
            f"The first, {first.path or '(model)'}: {first.reason}."
        )
    warnings.warn(text, NothingQuantizedWarning, stacklevel=3)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
