"""Put kernels into the layers that can take them, and note for the others why not."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pallas_hub.layers import attention, experts, norms, processors, routers, state
from pallas_hub.layers.interface import implementation_for, supports_gradient
from pallas_hub.layers.loading import ATTENTION, DEFAULT_REPOS, EXPERTS, NORM, ROUTER, Kernel, load_kernel
from pallas_hub.layers.repository import (
    PallasLayerRepository,
    can_torch_compile,
    guarded,
    has_backward,
    layer_class,
    with_input_of,
)

if TYPE_CHECKING:
    from kernels import Mode

logger = logging.getLogger(__name__)

# Why a module was left alone, told again by explain. Not kept on the module: what is left alone stays untouched.
REASONS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_TOLD: set[str] = set()


def kind_of(module: nn.Module) -> str | None:
    if norms.is_norm(module):
        return NORM
    if experts.is_experts(module):
        return EXPERTS
    if routers.is_router(module):
        return ROUTER
    return ATTENTION if processors.is_attention(module) or _is_told_of(module) else None


def _is_told_of(module: nn.Module) -> bool:
    """Whether kernelize has looked at this attention layer of Transformers, which it does not always do."""
    record = state.record_of(module)
    return (record is not None and record.layer == attention.LAYER) or (
        module in REASONS and attention.is_attention(module)
    )


def device_of(module: nn.Module) -> torch.device | None:
    parameter = next(module.parameters(), None)
    return None if parameter is None else parameter.device


def put_kernels(
    model: nn.Module, chosen: dict[str, str | ModuleType], mode: Mode | None, device: torch.device | None
) -> None:
    """Swap every layer of a chosen kind that can be swapped. Kernels are loaded only if a layer can use them."""
    fit_norms: list[tuple[nn.Module, norms.Norm]] = []
    fit_experts: list[nn.Module] = []
    fit_processors: list[nn.Module] = []
    fit_routers: list[tuple[nn.Module, routers.Router]] = []
    for module in model.modules():
        kind = kind_of(module)
        if kind is not None and kind not in chosen:
            REASONS[module] = f"kernelize was told to leave {kind} layers alone"
        elif kind == NORM:
            norm = norms.recognise(module)
            if isinstance(norm, str):
                REASONS[module] = norm
            else:
                fit_norms.append((module, norm))
        elif kind == EXPERTS:
            reason = experts.recognise(module)
            if reason is None:
                fit_experts.append(module)
            else:
                REASONS[module] = reason
        elif kind == ROUTER:
            router = routers.recognise(module, device or device_of(module))
            if isinstance(router, str):
                REASONS[module] = router
            else:
                fit_routers.append((module, router))
        elif kind == ATTENTION:
            reason = processors.recognise(module)
            if reason is None:
                fit_processors.append(module)
            else:
                REASONS[module] = reason
    if fit_norms:
        kernel = _load(chosen[NORM], "rms_norm")
        elsewhere = device_of(model) or torch.device("cpu")  # of layers without a weight
        for module, norm in fit_norms:
            _put_norm(module, norm, kernel, mode, device or device_of(module) or elsewhere)
    if fit_experts:
        _put_experts(model, fit_experts, chosen[EXPERTS], mode)
    if fit_processors:
        _put_processors(fit_processors, chosen[ATTENTION], mode)
    if fit_routers:
        _put_routers(fit_routers, chosen[ROUTER])


def put_attention(
    model: nn.Module, choice: str | ModuleType, mode: Mode | None, device: torch.device | None, asked: bool
) -> None:
    """Swap the attention of Transformers' models where a TPU runs it, or where it was asked for by its name."""
    if "transformers" not in sys.modules:
        return
    fit: list[Any] = []
    for module, owner in attention.owners(model):
        where = device or device_of(module) or torch.device("cpu")
        if not asked and where.type != "tpu":
            continue
        reason = attention.recognise(module, owner)
        if reason is None:
            fit.append(module)
        else:
            REASONS[module] = reason
    if not fit:
        return
    kernel = _load(choice, attention.LAYER)
    function = getattr(kernel.module, attention.LAYER)
    reason = _unfit_for_mode(
        getattr(function, "has_backward", True), getattr(function, "can_torch_compile", True), mode
    )
    if reason is None:
        attention.switch(model, fit, kernel)
    else:
        REASONS.update((module, reason) for module in fit)


def _load(choice: str | ModuleType, needed: str) -> Kernel:
    kernel = load_kernel(choice)
    if not hasattr(kernel.module, needed):
        names = getattr(kernel.module, "__all__", None) or [n for n in vars(kernel.module) if not n.startswith("_")]
        raise ValueError(f"kernelize: kernel {kernel.repo_id} must have {needed}; it has: {', '.join(sorted(names))}.")
    logger.info("kernelize: %s version %s from %s", kernel.repo_id, kernel.version, kernel.source)
    return kernel


def _put_norm(module: nn.Module, norm: norms.Norm, kernel: Kernel, mode: Mode | None, device: torch.device) -> None:
    layer = layer_class(kernel.module, norm.layer)
    reason = _unfit_for_mode(has_backward(layer), can_torch_compile(layer), mode) or norms.why_not(module, layer)
    if reason is not None:
        REASONS[module] = reason
        return
    if norm.marked is None:
        forward = with_input_of(type(module).forward, guarded(layer).forward)
        state.bind_forward(module, forward, kernel, norm.layer)
    else:
        _put_marked(module, norm.layer, norm.marked, kernel, mode, device)
    if not has_backward(layer) and module.training:
        _tell_once(kernel)


def _put_marked(
    module: nn.Module, layer: str, mark: str, kernel: Kernel, mode: Mode | None, device: torch.device
) -> None:
    """Through the kernels library, for this one module: on a whole model it also rebinds what it has no kernel for."""
    import kernels

    repository = PallasLayerRepository(kernel.repo_id, layer_name=layer, version=kernel.version, kernel=kernel)
    if mode is None:
        mode = kernels.Mode.TRAINING if module.training else kernels.Mode.INFERENCE
    old = module.__dict__.get("forward", state.ABSENT)
    with kernels.use_kernel_mapping({mark: {device.type: repository}}, inherit_mapping=False):
        kernels.kernelize(module, mode=mode, device=device)
    state.note_forward(module, old, kernel, layer)
    if not state.is_swapped(module):
        state.restore_forward(module)
        del module.__dict__[state.RECORD]
        REASONS[module] = "the kernels library kept the original (DISABLE_KERNEL_MAPPING or a condition of the class)"


def _put_experts(model: nn.Module, fit: list[nn.Module], choice: str | ModuleType, mode: Mode | None) -> None:
    kernel = _load(choice, "experts_forward")
    differentiable = supports_gradient(kernel)
    compilable = getattr(kernel.module.experts_forward, "can_torch_compile", True)
    reason = _unfit_for_mode(differentiable, compilable, mode)
    chosen: list[Any] = []
    for module in fit:
        why_not = reason or experts.probe(module, kernel)
        if why_not is None:
            chosen.append(module)
        else:
            REASONS[module] = why_not
    if not chosen:
        return
    if not differentiable and any(module.training for module in chosen):
        _tell_once(kernel)
    swapped = set(map(id, chosen))
    others = [module for module in model.modules() if kind_of(module) == EXPERTS and id(module) not in swapped]
    name = implementation_for(kernel, default=choice == DEFAULT_REPOS[EXPERTS])
    experts.switch(model, chosen, others, kernel, name)


def _put_routers(fit: list[tuple[nn.Module, routers.Router]], choice: str | ModuleType) -> None:
    kernel = _load(choice, routers.LAYER)
    for module, router in fit:
        reason = routers.why_not(module, router, kernel.module)
        if reason is None:
            state.bind_forward(module, routers.forward_for(router, kernel.module.router_topk), kernel, routers.LAYER)
        else:
            REASONS[module] = reason


def _put_processors(fit: list[nn.Module], choice: str | ModuleType, mode: Mode | None) -> None:
    kernel = _load(choice, processors.LAYER)
    function = getattr(kernel.module, processors.LAYER)
    compilable = getattr(function, "can_torch_compile", True)
    reason = _unfit_for_mode(getattr(function, "has_backward", True), compilable, mode)
    if reason is None:
        processors.put(fit, kernel, default=choice == DEFAULT_REPOS[ATTENTION])
    else:
        REASONS.update((module, reason) for module in fit)


def _unfit_for_mode(differentiable: bool, compilable: bool, mode: Mode | None) -> str | None:
    if mode is None:
        return None
    from kernels import Mode

    if Mode.TRAINING in mode and not differentiable:
        return "the kernel has no backward and mode is TRAINING"
    if Mode.TORCH_COMPILE in mode and not compilable:
        return "the kernel does not support torch.compile and mode has TORCH_COMPILE"
    return None


def _tell_once(kernel: Kernel) -> None:
    if kernel.repo_id not in _TOLD:
        _TOLD.add(kernel.repo_id)
        logger.warning(
            "kernelize: %s has no backward: wherever gradients are needed the original layer runs; the kernel runs "
            "in evaluation under torch.no_grad() or torch.inference_mode().",
            kernel.repo_id,
        )
