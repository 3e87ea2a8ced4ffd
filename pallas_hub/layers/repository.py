"""Layer classes of a kernel in the form that the `kernels` library asks for, and the layers we add to them."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from pallas_hub.layers.loading import Kernel, load_kernel

LLAMA = "RMSNorm"  # round to x.dtype, then multiply
ZERO_CENTERED = "RMSNormZeroCentered"  # multiply by 1 + weight in float32, then round (Gemma 1 to 3)
FLOAT32_SCALE = "RMSNormFloat32Scale"  # multiply by weight in float32, then round (Gemma 4, GPT-OSS, torch.nn.RMSNorm)
NO_SCALE = "RMSNormNoScale"  # no weight
WEIGHT_DTYPE = "RMSNormWeightDtype"  # round to weight.dtype, then multiply (Diffusers)


class PallasLayerRepository:
    """A layer of a kernel, for `kernels.use_kernel_mapping`.

    Unlike kernels.LayerRepository it takes a kernel that pallas_hub.get_kernel has loaded already: checked against its
    digests, from the Hub, the cache or the bundled copy. Layers that are only another way to call `rms_norm` are made
    here, and a kernel without a backward hands over to the original layer wherever a gradient is needed.
    """

    def __init__(self, repo_id: str, *, layer_name: str, version: int | None = None, kernel: Kernel | None = None):
        self.layer_name = layer_name
        self._choice = repo_id if version is None else f"{repo_id}@{version}"
        self._kernel = kernel

    @property
    def kernel(self) -> Kernel:
        if self._kernel is None:
            self._kernel = load_kernel(self._choice)
        return self._kernel

    def load(self) -> type[nn.Module]:
        return guarded(layer_class(self.kernel.module, self.layer_name))

    def _key(self) -> tuple:
        return self._choice, self.layer_name, None if self._kernel is None else id(self._kernel.module)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PallasLayerRepository) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return f"`{self._choice}`, layer `{self.layer_name}`"


_MADE: dict[tuple[int, str], tuple[ModuleType, type[nn.Module]]] = {}  # the module is kept: its id must stay taken
_GUARDED: dict[type[nn.Module], type[nn.Module]] = {}


def layer_class(kernel: ModuleType, name: str) -> type[nn.Module]:
    """A layer made of the kernel's `rms_norm` where classes keep epsilon under many names; else the kernel's own."""
    layers = getattr(kernel, "layers", None)
    made = {FLOAT32_SCALE: _float32_scale_layer, NO_SCALE: _no_scale_layer, WEIGHT_DTYPE: _weight_dtype_layer}
    if name not in made:
        own = getattr(layers, name, None)
        if own is None:
            raise ValueError(f"kernelize: kernel {kernel.__name__} has no layer {name}.")
        return own
    key = (id(kernel), name)
    if key not in _MADE:
        _MADE[key] = (kernel, made[name](kernel.rms_norm, getattr(layers, LLAMA, None)))
    return _MADE[key][1]


def has_backward(layer: type[nn.Module]) -> bool:
    return getattr(layer, "has_backward", True)  # the default of the kernels library


def can_torch_compile(layer: type[nn.Module]) -> bool:
    return getattr(layer, "can_torch_compile", False)  # the default of the kernels library


def guarded(layer: type[nn.Module]) -> type[nn.Module]:
    """The layer, or one in its place that runs the original where the kernel cannot: for gradients, when compiled.

    The switch is made at every call, not when the kernel is put in: train() and eval() may follow at any time.
    """
    differentiable, compilable = has_backward(layer), can_torch_compile(layer)
    if differentiable and compilable:
        return layer
    if layer in _GUARDED:
        return _GUARDED[layer]
    kernel_forward = layer.forward

    class Guarded(nn.Module):
        can_torch_compile = True
        has_backward = True

        def forward(self, hidden_states):
            if not compilable and torch.compiler.is_compiling():
                return type(self).forward(self, hidden_states)
            if not differentiable and needs_gradient(self, hidden_states):
                return type(self).forward(self, hidden_states)
            return kernel_forward(self, hidden_states)

    Guarded.__name__ = Guarded.__qualname__ = f"Guarded{layer.__name__}"
    _GUARDED[layer] = Guarded
    return Guarded


@functools.cache
def with_input_of(original: FunctionType, forward: FunctionType) -> FunctionType:
    """`forward` with its input called as `original` calls it: torch.nn.RMSNorm may be called with x=.

    The code is renamed and not wrapped, which would cost every call; and cached, since a compiler compiles it once.
    """
    name, ours = (list(inspect.signature(function).parameters)[1] for function in (original, forward))
    code = forward.__code__
    if name == ours or name in code.co_varnames + code.co_freevars or ours in code.co_cellvars:
        return forward
    code = code.replace(co_varnames=tuple(name if known == ours else known for known in code.co_varnames))
    return FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)


def needs_gradient(module: nn.Module, *inputs: torch.Tensor) -> bool:
    """True in training, and in evaluation when autograd records: no gradient may be lost without a word."""
    if not torch.is_grad_enabled():
        return False
    return (
        module.training
        or any(tensor.requires_grad for tensor in inputs)
        or any(parameter.requires_grad for parameter in module.parameters())
    )


def eps_of(module: nn.Module) -> float:
    """The epsilon under whichever name the class keeps it. None is torch.nn.RMSNorm's word for float32's."""
    values = module.__dict__  # not getattr: what it costs nn.Module to say no is a tenth of a small layer's time
    for name in ("eps", "variance_epsilon", "epsilon"):
        if name in values:
            eps = values[name]
            return torch.finfo(torch.float32).eps if eps is None else eps
    raise AttributeError(f"{type(module).__name__} has no variance_epsilon, eps or epsilon.")


def _float32_scale_layer(rms_norm, like: type[nn.Module] | None) -> type[nn.Module]:
    in_one_pass = "float32_scale" in inspect.signature(rms_norm).parameters

    class RMSNormFloat32Scale(nn.Module):
        can_torch_compile = like is not None and can_torch_compile(like)
        has_backward = like is None or has_backward(like)

        def forward(self, hidden_states):
            if in_one_pass:
                return rms_norm(hidden_states, self._parameters["weight"], eps_of(self), float32_scale=True)
            y = rms_norm(hidden_states.to(torch.float32), self.weight.to(torch.float32), eps_of(self))
            return y.to(hidden_states.dtype)

    return RMSNormFloat32Scale


def _no_scale_layer(rms_norm, like: type[nn.Module] | None) -> type[nn.Module]:
    takes_none = "None" in str(inspect.signature(rms_norm).parameters["weight"].annotation)

    class RMSNormNoScale(nn.Module):
        can_torch_compile = like is not None and can_torch_compile(like)
        has_backward = like is None or has_backward(like)

        def forward(self, hidden_states):
            # Multiplying by one rounds nothing.
            weight = None if takes_none else hidden_states.new_ones(hidden_states.shape[-1])
            return rms_norm(hidden_states, weight, eps_of(self))

    return RMSNormNoScale


def _weight_dtype_layer(rms_norm, like: type[nn.Module] | None) -> type[nn.Module]:
    class RMSNormWeightDtype(nn.Module):
        can_torch_compile = like is not None and can_torch_compile(like)
        has_backward = like is None or has_backward(like)

        def forward(self, hidden_states):
            weight: Any = self._parameters["weight"]
            if hidden_states.dtype == weight.dtype:
                return rms_norm(hidden_states, weight, eps_of(self))
            wide = hidden_states.to(torch.float32)
            if weight.dtype == torch.float32:
                return rms_norm(wide, weight, eps_of(self))
            # Multiplying by one rounds nothing.
            return rms_norm(wide, torch.ones_like(weight, dtype=torch.float32), eps_of(self)).to(weight.dtype) * weight

    return RMSNormWeightDtype
