"""Compare swapped layers with their originals, on the inputs that they really get where that is possible."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from pallas_hub.layers import attention, experts, norms, processors, routers, state

Measured = tuple[str, float, float, float]  # inputs, max_abs_error, max_rel_error, tolerance


def compare_layers(model: nn.Module, inputs: Any = None) -> dict[str, Measured]:
    """Path of a swapped layer -> how far its result is from the original's.

    With model inputs (or the model's dummy_inputs) the model runs once, in evaluation mode and without gradients, and
    each layer is compared at its first call. Layers not reached by that, and models without such inputs, get random
    inputs.
    """
    layers = {path: module for path, module in model.named_modules() if _can_compare(module)}
    measured: dict[str, Measured] = {}
    run_inputs = _dummy_inputs(model) if inputs is None else inputs
    if run_inputs is not None:
        _capture(model, layers, run_inputs, measured, must_run=inputs is not None)
    with torch.no_grad():
        for path, module in layers.items():
            if path not in measured and not processors.is_attention(module):  # whose inputs only a model can make
                measured[path] = ("random", *_compare(module, _random_inputs(module), {}))
    return measured


def _can_compare(module: nn.Module) -> bool:
    """A swapped layer that may run twice on the same inputs: attention writes its cache, and gets masks of its own."""
    return state.is_swapped(module) and not attention.is_attention(module)


def _capture(model: nn.Module, layers: dict, inputs: Any, measured: dict, must_run: bool) -> None:
    def watch(path: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
            if path not in measured:
                measured[path] = ("captured", *_compare(module, args, kwargs, result))

        return hook

    # First in line, so that the user's own hooks have not changed the result yet.
    handles = [
        module.register_forward_hook(watch(path), prepend=True, with_kwargs=True) for path, module in layers.items()
    ]
    training = {module: module.training for module in model.modules()}
    try:
        for module in training:
            module.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _run_eagerly():
            _call(model, inputs)
    except Exception:
        if must_run:
            raise
    finally:
        for module, mode in training.items():
            module.training = mode
        for handle in handles:
            handle.remove()


_STANCE = threading.Lock()  # what torch remembers for the whole process must be put back in order


@contextlib.contextmanager
def _run_eagerly() -> Generator[None]:
    """Inside, a compiled model runs as it is written: it would be compiled with our hooks in it, and again later."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a second
        yield
        return
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, torch.Tensor):
        model(inputs)
    elif hasattr(inputs, "keys"):
        model(**inputs)
    else:
        model(*inputs)


def _dummy_inputs(model: nn.Module) -> dict | None:
    inputs = getattr(model, "dummy_inputs", None)
    parameter = next(model.parameters(), None)
    if not isinstance(inputs, dict) or parameter is None:
        return None
    return {name: value.to(parameter.device) if hasattr(value, "to") else value for name, value in inputs.items()}


def _random_inputs(module: nn.Module) -> tuple[torch.Tensor, ...]:
    if experts.is_experts(module):
        return experts.example_inputs(module, tokens=16)
    if routers.is_router(module):
        return routers.example_inputs(module, tokens=16)
    weight = module._parameters.get("weight")
    dtype, device = (torch.float32, "cpu") if weight is None else (weight.dtype, weight.device)
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.device("cpu"):
        x = torch.randn(16, norms.width_of(module), generator=generator)
    return (x.to(device, dtype),)


def _compare(module: nn.Module, args: tuple, kwargs: dict, result: Any = None) -> tuple[float, float, float]:
    if result is None:
        result = module.forward(*args, **kwargs)
    if routers.is_router(module):
        return routers.compare(result, type(module).forward(module, *args, **kwargs))
    if experts.is_experts(module):
        old = module.__dict__[state.RECORD].old_values["config"]
        wanted = experts.original_forward(module, old._experts_implementation)(module, *args, **kwargs)
        tolerance = experts.tolerance(module)
    elif processors.is_attention(module):
        result, wanted = _as_one(result), _as_one(processors.run_original(module, args, kwargs))
        tolerance = processors.tolerance(wanted)
    else:
        wanted = type(module).forward(module, *args, **kwargs)
        tolerance = _norm_tolerance(wanted)
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        return float("inf"), float("inf"), tolerance
    if wanted.numel() == 0:
        return 0.0, 0.0, tolerance
    wanted, result = wanted.double(), result.double()
    error = (result - wanted).abs().max().item()
    return error, error / max(wanted.abs().max().item(), torch.finfo(torch.float32).tiny), tolerance


def _as_one(results: Any) -> torch.Tensor:
    """Joint attention gives a tensor for each of its sequences: as rows of one."""
    if isinstance(results, torch.Tensor):
        return results
    rows = [result.flatten(0, -2) for result in results if result is not None]
    return torch.cat(rows) if len({row.shape[-1] for row in rows}) == 1 else torch.cat([row.flatten() for row in rows])


def _norm_tolerance(result: torch.Tensor) -> float:
    """One unit in the last place of the result, and what summing n squares in another order moves the root by."""
    n = result.shape[-1] if result.dim() else 1
    return torch.finfo(result.dtype).eps + 4 * torch.finfo(torch.float32).eps * n**0.5
