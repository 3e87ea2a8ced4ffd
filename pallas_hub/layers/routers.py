"""Which router a module is: found by structure, settled by running its forward beside what router_topk can do.

A router multiplies tokens by a weight, scores experts, chooses, and weights the chosen. Classes differ in the dtype of
each step, in the scores, in what is added, divided by and multiplied with. A stand-in with random weights runs on the
CPU, in float32, bfloat16 and mixed, and all its results must be those of one such rule; the module itself and its hooks
are not touched. Of experts with equal scores torch.topk takes any, so any is accepted. Groups that are dropped to 0 and
such that are dropped to -inf are told apart by scores below 0 only: probabilities that vanish in float32 don't count.

Under autocast, which changes the dtypes, and where no kernel runs, the original forward does.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from pallas_hub.layers.norms import FLOATS
from pallas_hub.layers.router_probe import agrees, find, originals_of
from pallas_hub.layers.router_rules import (
    PRODUCTS,
    TOP_K,
    Route,
    Router,
    first_of,
    has_weight,
    run,
    weight_of,
)
from pallas_hub.layers.state import has_class_forward, is_swapped

LAYER = "router_topk"
DEVICES = ("tpu",)  # where a kernel gains something
NO_GAIN = "where a kernel gains nothing"
_NAME = re.compile(r"Router|Gate$|Gating$")
_CHOOSES = {"topk", "sparsemixer"}  # what a router's methods call


def is_router(module: Any) -> bool:
    """True for everything that looks like a router, including those that recognise() turns down."""
    cls = type(module)
    marked = getattr(cls, "kernel_layer_name", None) == "SoftmaxTopKRouter"
    return marked or (isinstance(module, nn.Module) and _NAME.search(cls.__name__) is not None and _chooses(cls))


def recognise(module: Any, device: torch.device | None = None) -> Router | str:
    """Which rule the module follows, or why no kernel may stand in for it.

    device   where it will run. Elsewhere than on DEVICES router_topk is the torch operations that a router consists of
             anyway, so there is nothing to gain; None asks for the rule alone
    """
    reason = _unfit(module)
    if reason is not None:
        return reason
    if device is not None and device.type not in DEVICES:
        return (
            f'it stays torch code on {device.type}, {NO_GAIN}; kernelize(model, device="tpu") swaps it before a move '
            "to a TPU"
        )
    key = _key(module)
    if key not in _FOUND:
        _FOUND[key] = (find(module), getattr(module, "config", None))  # kept: its id is in the key
    return _FOUND[key][0]


def why_not(module: Any, router: Router, kernel: Any) -> str | None:
    """Why this kernel's router_topk cannot run in the module's place, or None: tried like the rule itself."""
    key = (router, kernel, *_key(module))
    if key not in _CANNOT_RUN:
        originals = originals_of(module)
        assert not isinstance(originals, str)  # there is a rule for it
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            fits = all(agrees(router, kernel.router_topk, original) for original in originals)
        _CANNOT_RUN[key] = None if fits else "the kernel's router_topk computes something else"
    return _CANNOT_RUN[key]


@functools.cache  # a compiler compiles one function once
def forward_for(router: Router, route: Route) -> Callable:
    """A forward for the module that this rule was found for. `route` is the kernel's router_topk."""

    def forward(self: Any, hidden_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden_states.device.type
        if torch.is_autocast_enabled(device) or (hidden_states.dim() != 2 and not router.flattens):
            return type(self).forward(self, hidden_states, *more, **named)
        bias = more[0] if more else next(iter(named.values()), None)
        return run(router, route, self, hidden_states, bias)

    return forward


def example_inputs(module: Any, tokens: int) -> tuple[Tensor, ...]:
    """Random tokens of the module's own width, dtype and device; and a bias, where that is an argument."""
    router = recognise(module)
    assert not isinstance(router, str)  # it was swapped
    weight = weight_of(module, router.product)
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.device("cpu"):
        x = torch.randn(tokens, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
        bias = 0.1 * torch.randn(weight.shape[0], generator=generator).to(weight.device)
    return (x, bias) if router.bias == "" else (x,)


def compare(came: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> tuple[float, float, float]:
    """Largest absolute and relative difference of logits and weights, and what the latter may be.

    Weights are compared in the order of their size: some routers leave the order of their choices open, and of equal
    scores any may be chosen. Each is rounded once; the sums of a softmax grow with the number of experts.
    """
    experts = wanted[0].shape[-1]
    tolerance = 2 * torch.finfo(wanted[1].dtype).eps + 4 * torch.finfo(torch.float32).eps * experts**0.5
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in zip(came, wanted, strict=True)):
        return float("inf"), float("inf"), tolerance
    largest, relative = 0.0, 0.0
    in_order = (part[1].sort(dim=-1).values for part in (came, wanted))
    for one, other in ((came[0], wanted[0]), tuple(in_order)):
        if other.numel():
            error = (one.double() - other.double()).abs().max().item()
            largest = max(largest, error)
            relative = max(relative, error / max(other.abs().max().item(), torch.finfo(torch.float32).tiny))
    return largest, relative, tolerance


def _chooses(cls: type) -> bool:
    """Whether the class's own methods, or what they call by name in their file, choose the best of something."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base in (nn.Module, nn.Linear, object):
            break
        for value in vars(base).values():
            code = getattr(value, "__code__", None)
            if isinstance(code, CodeType):
                seen.update(code.co_names)
    return bool(seen & _CHOOSES)


def _unfit(module: Any) -> str | None:
    cls = type(module)
    home = getattr(cls.forward, "__module__", "") or ""
    if not home.startswith(("transformers.", "transformers_modules.")):
        return f"its forward is defined in {home}, not in Transformers"
    if not is_swapped(module) and not has_class_forward(module):
        return "its forward was already replaced on the instance"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over processes"
    if module._modules.get("parametrizations") is not None:
        return "its weights are parametrized"
    names = [name for name in inspect.signature(cls.forward).parameters if name != "self"]
    if len(names) > 2 or (len(names) == 2 and "bias" not in names[1]):
        return f"its forward takes {', '.join(names)}; the kernel takes tokens, and a bias"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        reason = _unfit_tensor(tensor)
        if reason is not None:
            return f"{name} {reason}"
    if not any(has_weight(module, name) for name in PRODUCTS):
        return "it has no weight (experts, hidden size) that tokens are multiplied by"
    return None if first_of(module, TOP_K) is not None else "it does not say how many experts it chooses"


def _unfit_tensor(tensor: Tensor) -> str | None:
    plain = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    if type(tensor) not in (nn.Parameter, Tensor) or type(plain) is not Tensor:
        return f"is a {type(plain).__name__}, which the kernel has no rule for"
    if tensor.is_floating_point() and tensor.dtype not in FLOATS:
        return (
            f"is {str(tensor.dtype).removeprefix('torch.')}, quantised; the kernel takes float32, bfloat16 and float16"
        )
    return "is on the meta device; load the model first" if tensor.device.type == "meta" else None


_FOUND: dict[tuple, tuple[Router | str, Any]] = {}
_CANNOT_RUN: dict[tuple, str | None] = {}


def _key(module: Any) -> tuple:
    plain = (bool, int, float, str, tuple, type(None))
    values = tuple(
        (name, repr(value))
        for name, value in sorted(module.__dict__.items())
        if not name.startswith("_") and name != "forward" and isinstance(value, plain)
    )
    shapes = tuple((name, tuple(t.shape)) for name, t in (*module.named_parameters(), *module.named_buffers()))
    return (type(module), type(module).forward, values, shapes, id(getattr(module, "config", None)))
