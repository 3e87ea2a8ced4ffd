"""Which RMSNorm a module is: found by structure, settled by running its forward beside the formulas it may be.

Classes that share a name differ in where they round and what they multiply by, so the name does not decide. A
stand-in of the same class with a random weight runs on the CPU in float32, bfloat16 and mixed; the module itself and
its hooks are not touched.
"""

from __future__ import annotations

import inspect
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pallas_hub.layers import repository as layers
from pallas_hub.layers.state import has_class_forward, is_swapped

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MARKS = ("RMSNorm", "RMSNormZeroCentered")  # kernel_layer_name of layers with one input
_KNOWN_HOMES = ("transformers.", "transformers_modules.", "diffusers.", "torch.nn.")
_DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))


@dataclass(frozen=True)
class Norm:
    """An RMSNorm that a kernel can stand in for."""

    layer: str  # which of the layers in repository.py
    marked: str | None  # kernel_layer_name, when the kernels library knows the class


def is_norm(module: Any) -> bool:
    """True for everything that looks like an RMSNorm, including those that recognise() turns down."""
    return (
        isinstance(module, nn.RMSNorm)
        or "RMSNorm" in type(module).__name__
        or getattr(type(module), "kernel_layer_name", None) in MARKS
    )


def recognise(module: Any) -> Norm | str:
    """Which layer may stand in for the module, or why none may."""
    reason = _unfit(module)
    if reason is not None:
        return reason
    layer = _layer_for(module)
    if layer.startswith("!"):
        return layer[1:]
    mark = getattr(type(module), "kernel_layer_name", None)
    return Norm(layer=layer, marked=mark if mark in MARKS else None)


def why_not(module: Any, layer: type[nn.Module]) -> str | None:
    """Why this kernel's layer cannot run in the module's place, or None. Values are for verify to judge."""
    weight = module._parameters.get("weight")
    dtype = torch.float32 if weight is None else weight.dtype
    key = (type(module), layer, width_of(module), dtype, tuple(sorted(module.__dict__)))
    if key not in _CANNOT_RUN:
        x, random_weight = _example(width_of(module), dtype, None if weight is None else dtype)
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                result = layer.forward(stand_in(module, random_weight), x)
            fits = result.shape == x.shape and result.dtype == dtype
            _CANNOT_RUN[key] = None if fits else f"the kernel's result is {_name(result.dtype)} {tuple(result.shape)}"
        except Exception as error:
            reason = f"the kernel cannot run it: {type(error).__name__}: {_first_line(error)}"
            if isinstance(error, ImportError):  # of the environment, not the layer: an installation mends it
                return reason
            _CANNOT_RUN[key] = reason
    return _CANNOT_RUN[key]


def width_of(module: Any) -> int:
    weight = module._parameters.get("weight")
    if weight is not None:
        return weight.shape[0]
    shape = getattr(module, "normalized_shape", None)
    return shape[-1] if shape else 64  # a layer without a weight takes any width


def stand_in(module: Any, weight: torch.Tensor | None) -> Any:
    """An object of the same class and attributes with another weight: for calling forwards on, nothing else."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.pop("forward", None)
    twin.__dict__["_parameters"] = {"weight": weight}
    return twin


def _unfit(module: Any) -> str | None:
    cls = type(module)
    home = getattr(cls.forward, "__module__", "") or ""
    marked = getattr(cls, "kernel_layer_name", None) in MARKS
    if not marked and not home.startswith(_KNOWN_HOMES):
        return (
            f"its forward is defined in {home}, not in Transformers, Diffusers or torch; to have it swapped, mark "
            f'the class with @kernels.use_kernel_forward_from_hub("RMSNorm")'
        )
    if not is_swapped(module) and not has_class_forward(module):
        forward = module.__dict__["forward"]
        name = getattr(forward, "__qualname__", type(forward).__qualname__)
        return f"its forward was already replaced on the instance, by {name}"
    names = [name for name in inspect.signature(cls.forward).parameters if name != "self"]
    if len(names) != 1:
        return f"its forward takes {len(names)} inputs ({', '.join(names)}); the kernel takes one"
    if module._modules:
        return f"it holds other modules ({', '.join(module._modules)}), such as a parametrization"
    others = [name for name, value in module._parameters.items() if value is not None and name != "weight"]
    others += [f"{name} (a buffer)" for name, value in module._buffers.items() if value is not None]
    if others:
        return f"it has tensors that are no weight: {', '.join(others)}"
    return _unfit_weight(module)


def _unfit_weight(module: Any) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        if len(getattr(module, "normalized_shape", (0,))) != 1:
            return f"it normalises over {len(module.normalized_shape)} dimensions; the kernel takes the last one"
        return None
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, not a plain parameter"
    if type(weight.data) is not torch.Tensor:
        return f"its weight holds a {type(weight.data).__name__}, which the kernel has no rule for"
    if weight.dim() != 1:
        return f"its weight has {weight.dim()} dimensions; the kernel takes one"
    if weight.dtype not in FLOATS:
        return f"its weight is {_name(weight.dtype)}; the kernel takes float32, bfloat16 and float16"
    if weight.device.type == "meta":
        return "its weight is on the meta device; load the model first"
    return None


_FOUND: dict[tuple, str] = {}
_CANNOT_RUN: dict[tuple, str | None] = {}


def _layer_for(module: Any) -> str:
    """Name of the layer, or "!" and the reason why there is none. Settled once per class and configuration."""
    try:
        eps = layers.eps_of(module)
    except AttributeError as error:
        return f"!{error}"
    has_weight = module._parameters.get("weight") is not None
    key = (type(module), type(module).forward, eps, has_weight, width_of(module), _plain_attributes(module))
    if key not in _FOUND:
        _FOUND[key] = _probe(module, eps, has_weight)
    return _FOUND[key]


def _plain_attributes(module: Any) -> tuple:
    """Whatever else the forward may look at: with_scale, normalized_shape and the like."""
    plain = (bool, int, float, str, tuple, type(None))
    names = sorted(name for name in module.__dict__ if not name.startswith("_") and name != "forward")
    return tuple((name, repr(module.__dict__[name])) for name in names if isinstance(module.__dict__[name], plain))


def _probe(module: Any, eps: float, has_weight: bool) -> str:
    with_weight = [layers.LLAMA, layers.FLOAT32_SCALE, layers.ZERO_CENTERED, layers.WEIGHT_DTYPE]
    candidates = with_weight if has_weight else [layers.NO_SCALE]
    differences = dict.fromkeys(candidates, 0.0)
    for x_dtype, weight_dtype in _DTYPES if has_weight else ((torch.float32, None), (torch.bfloat16, None)):
        x, weight = _example(width_of(module), x_dtype, weight_dtype)
        try:
            wanted = _run_original(module, x, weight)
        except Exception as error:  # whatever it is, this forward is not that of an RMSNorm
            return f"!its forward fails on a plain input: {type(error).__name__}: {_first_line(error)}"
        for name in candidates:
            differences[name] = max(differences[name], _share_that_differs(_formula(name, x, weight, eps), wanted))
    best = min(differences, key=lambda name: differences[name])
    # Another order of rounding changes a tenth of the values or more, another way to the same root one in a hundred.
    if differences[best] <= 0.05:
        return best
    return f"!its forward computes something else than the kernel: {differences[best]:.0%} of the values differ"


def _example(n: int, x_dtype: torch.dtype, weight_dtype: torch.dtype | None):
    """Rows of three sizes, the smallest so small that epsilon counts."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.device("cpu"):
        sizes = torch.tensor([1.0, 1e-3, 30.0]).repeat_interleave(8)[:, None]
        x = (torch.randn(24, n, generator=generator) * sizes).to(x_dtype)
        weight = None if weight_dtype is None else torch.randn(n, generator=generator).to(weight_dtype)
    return x.view(2, 12, n), weight


def _run_original(module: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    twin = stand_in(module, weight)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.nn.RMSNorm warns when x and weight differ in dtype
        return type(module).forward(twin, x)


def _formula(name: str, x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
    unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if name == layers.LLAMA:
        return weight * unit.to(x.dtype)
    if name == layers.WEIGHT_DTYPE:
        return weight * unit.to(weight.dtype)
    if name == layers.FLOAT32_SCALE:
        return (weight.float() * unit).to(x.dtype)
    if name == layers.ZERO_CENTERED:
        return ((1.0 + weight.float()) * unit).to(x.dtype)
    return unit.to(x.dtype)


def _share_that_differs(y: torch.Tensor, wanted: object) -> float:
    """0 to 1; 1 also for another shape or dtype. In float32 the last bits may differ, in bfloat16 none."""
    if not isinstance(wanted, torch.Tensor) or y.shape != wanted.shape or y.dtype != wanted.dtype:
        return 1.0
    rtol = 1e-5 if y.dtype == torch.float32 else 0.0
    return 1.0 - torch.isclose(y, wanted, rtol=rtol, atol=0.0).float().mean().item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    return re.split(r"\n", str(error), maxsplit=1)[0][:120]
