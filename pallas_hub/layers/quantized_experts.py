"""What an experts layer becomes when its weights are quantised: the same module, of a class with another forward.

It holds four buffers in place of its weights, which no optimiser, weight decay or requires_grad_ reaches:
gate_up_data, gate_up_scale, down_data, down_scale. Other names than before, so that code which reads the weights
directly, such as Transformers' own loops and the conversions of its checkpoints, fails and cannot take them for floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pallas_hub.layers.loading import Kernel, load_kernel

BUFFERS = ("gate_up_data", "gate_up_scale", "down_data", "down_scale")
_BITS = {1: torch.uint8, 4: torch.int32}  # size of an item -> a dtype that no cast of floats touches


class QuantizedExperts(nn.Module):
    """Comes before the layer's own class in a class that quantized_class() makes."""

    kernel: ClassVar[Kernel]
    experts_forward: ClassVar[Callable]
    quantization_format: str  # of this layer

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        return self.quantization_format

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        """For .to(), .half(), .cuda() and the like: these tensors move, and keep their dtypes."""
        own = {id(self._buffers[name]) for name in BUFFERS}
        return super()._apply(lambda tensor: _moved(tensor, fn) if id(tensor) in own else fn(tensor), recurse)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        misfits = list(self._misfits(state_dict, prefix))
        error_msgs.extend(misfits)  # load_state_dict raises with them
        if not misfits:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )

    def _misfits(self, state_dict: dict, prefix: str) -> Iterator[str]:
        who = (
            f"{prefix.removesuffix('.') or type(self).__name__}: its weights are quantised ({self.quantization_format})"
        )
        for name in ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"):
            if prefix + name in state_dict:
                yield (
                    f"{who}, the state dict holds {name}, {_describe(state_dict[prefix + name])}. "
                    f"Load float weights before quantize_experts."
                )
        for name in BUFFERS:
            mine, theirs = getattr(self, name), state_dict.get(prefix + name)
            if theirs is not None and (theirs.dtype != mine.dtype or theirs.shape != mine.shape):
                yield (
                    f"{who}: {name} is {_describe(mine)}; the state dict's is {_describe(theirs)}, of another format "
                    f"or size. Quantise the model in the format that the state dict was saved in."
                )

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """For copies and pickles, which cannot find a class that was made at run time."""
        base = type(self).__bases__[1]
        return _empty, (base, self.kernel), dict(self.__dict__)


_CLASSES: dict[tuple[type, ModuleType], type] = {}


def quantized_class(base: type[nn.Module], kernel: Kernel) -> Any:
    key = base, kernel.module
    if key not in _CLASSES:
        content = {
            "__module__": base.__module__,
            "__doc__": base.__doc__,
            "kernel": kernel,
            "experts_forward": staticmethod(kernel.module.experts_forward),
        }
        _CLASSES[key] = type(f"Quantized{base.__name__}", (QuantizedExperts, base), content)
    return _CLASSES[key]


def _empty(base: type[nn.Module], kernel: Kernel) -> nn.Module:
    """A module of the class and nothing in it; what comes from a pickle names its kernel, and it is loaded here."""
    if kernel.module is None:
        version = "" if kernel.version is None else f"@{kernel.version}"
        kernel = load_kernel(kernel.repo_id + version)
    return object.__new__(quantized_class(base, kernel))


def _moved(tensor: Tensor, fn: Callable) -> Tensor:
    bits = tensor.view(_BITS[tensor.element_size()])
    result = fn(bits)
    if result is bits:
        return tensor
    if result.dtype != bits.dtype:  # fn casts anything, as Module.type() does
        return tensor.to(result.device)
    return result.view(tensor.dtype)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
