"""kernelize, explain, unkernelize: decide for every layer, change the instances, and take all of it back."""

from __future__ import annotations

import logging
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pallas_hub.layers import experts, norms, state
from pallas_hub.layers.errors import NothingSwapped, NothingSwappedWarning, VerificationError
from pallas_hub.layers.interface import implementation_for, supports_gradient
from pallas_hub.layers.loading import (
    DEFAULT_REPOS,
    EXPERTS,
    NORM,
    Kernel,
    KernelChoice,
    choose_kernels,
    load_kernel,
    path_of,
)
from pallas_hub.layers.report import LayerReport, Report
from pallas_hub.layers.repository import PallasLayerRepository, can_torch_compile, guarded, has_backward, layer_class
from pallas_hub.layers.verify import compare_layers

if TYPE_CHECKING:
    from kernels import Mode

logger = logging.getLogger(__name__)

# Why a module was left alone, told again by explain. Not kept on the module: what is left alone stays untouched.
_REASONS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def kernelize(
    model: nn.Module,
    *,
    kernels: KernelChoice = None,
    mode: Mode | None = None,
    device: str | torch.device | None = None,
    verify: bool | Any = False,
    strict: bool = False,
) -> Report:
    """Let the RMSNorm layers and the experts of `model` run Hub kernels. Changes this model only, and in place.

    kernels  what to swap and by which kernel: None (all defaults), kinds such as ["RMSNorm"], or a dict such as
             {"RMSNorm": "org/name@1", "experts": None}; values may be loaded kernel modules
    mode     a kernels.Mode, when the use is fixed; None: right in training and evaluation, whichever comes
    device   where the layers will run, if not where they are now
    verify   True: compare each swapped layer with its original on its own inputs, from a run on the model's
             dummy_inputs (random inputs for layers that this does not reach); model inputs (dict, tuple or
             tensor): from a run on these
    strict   raise NothingSwapped, instead of a warning, if no layer was swapped
    Raises   VerificationError: a result differs by more than rounding explains; the model is as before.
    """
    chosen = choose_kernels(kernels)
    unkernelize(model)  # swapping twice is swapping once, with the kernels of the second call
    try:
        report = _swap(model, chosen, mode, None if device is None else torch.device(device))
        if verify is not False and verify is not None and report.swapped:
            _verify(model, report, None if verify is True else verify)
        if not report.swapped:
            _nothing_swapped(report, strict)
    except BaseException:
        unkernelize(model)
        raise
    return report


def explain(model: nn.Module) -> Report:
    """What each layer runs now, or why it runs its original code. Changes and loads nothing."""
    report = Report(model=type(model).__name__)
    for path, module in model.named_modules():
        if _kind(module) is not None:
            report.layers.append(_describe(path, module))
    return report


def unkernelize(model: nn.Module) -> nn.Module:
    """Undo kernelize: every instance dictionary and the config are what they were. Undoing twice is undoing once."""
    marked = [module for module in model.modules() if state.record_of(module) is not None]
    for module in marked:
        state.restore_forward(module)
    experts.restore_configs(marked)
    for module in marked:
        del module.__dict__[state.RECORD]
    for module in model.modules():
        _REASONS.pop(module, None)
    return model


def _kind(module: nn.Module) -> str | None:
    if norms.is_norm(module):
        return NORM
    return EXPERTS if experts.is_experts(module) else None


def _swap(model: nn.Module, chosen: dict, mode: Mode | None, device: torch.device | None) -> Report:
    kinds = [(module, kind) for module in model.modules() if (kind := _kind(module)) is not None]
    fit: dict[str, list[nn.Module]] = {NORM: [], EXPERTS: []}
    found: dict[nn.Module, norms.Norm] = {}
    for module, kind in kinds:
        reason = None if kind in chosen else f"kernelize was told to leave {kind} layers alone"
        if reason is None and kind == NORM:
            norm = norms.recognise(module)
            reason = norm if isinstance(norm, str) else None
            found[module] = norm
        elif reason is None:
            reason = experts.recognise(module)
        if reason is not None:
            _REASONS[module] = reason
        else:
            fit[kind].append(module)
    if fit[NORM]:
        kernel = _load(chosen[NORM], "rms_norm")
        fallback = device or _device_of(model) or torch.device("cpu")
        for module in fit[NORM]:
            _swap_norm(module, found[module], kernel, mode, device or _device_of(module) or fallback)
    if fit[EXPERTS]:
        kernel = _load(chosen[EXPERTS], "experts_forward")
        everyone = [module for module, kind in kinds if kind == EXPERTS]
        chosen_experts = _swappable_experts(fit[EXPERTS], kernel, mode)
        if chosen_experts:
            name = implementation_for(kernel, default=chosen[EXPERTS] == DEFAULT_REPOS[EXPERTS])
            others = [module for module in everyone if module not in set(chosen_experts)]
            experts.switch(model, chosen_experts, others, kernel, name)
    return explain(model)


def _load(choice: str | ModuleType, needed: str) -> Kernel:
    kernel = load_kernel(choice)
    if not hasattr(kernel.module, needed):
        names = getattr(kernel.module, "__all__", None) or [n for n in vars(kernel.module) if not n.startswith("_")]
        raise ValueError(f"kernelize: kernel {kernel.repo_id} must have {needed}; it has: {', '.join(sorted(names))}.")
    logger.info("kernelize: %s version %s from %s", kernel.repo_id, kernel.version, kernel.source)
    return kernel


def _swap_norm(module: nn.Module, norm: norms.Norm, kernel: Kernel, mode: Mode | None, device: torch.device) -> None:
    layer = layer_class(kernel.module, norm.layer)
    reason = _unfit_for_mode(has_backward(layer), can_torch_compile(layer), mode) or norms.why_not(module, layer)
    if reason is not None:
        _REASONS[module] = reason
    elif norm.marked is None:
        state.bind_forward(module, guarded(layer).forward, kernel, norm.layer)
    else:
        _swap_marked(module, norm, kernel, mode, device)
    if reason is None and not has_backward(layer) and module.training:
        _tell_once(kernel)


def _swap_marked(module: nn.Module, norm: norms.Norm, kernel: Kernel, mode: Mode | None, device: torch.device) -> None:
    """Through the kernels library, for this one module: kernelize on a whole model also rebinds what it has no
    kernel for."""
    import kernels

    repository = PallasLayerRepository(kernel.repo_id, layer_name=norm.layer, version=kernel.version, kernel=kernel)
    if mode is None:
        mode = kernels.Mode.TRAINING if module.training else kernels.Mode.INFERENCE
    old = module.__dict__.get("forward", state._ABSENT)
    with kernels.use_kernel_mapping({norm.marked: {device.type: repository}}, inherit_mapping=False):
        kernels.kernelize(module, mode=mode, device=device)
    state.note_forward(module, old, kernel, norm.layer)
    if not state.is_swapped(module):  # DISABLE_KERNEL_MAPPING, or the kernel_condition of the class
        state.restore_forward(module)
        del module.__dict__[state.RECORD]
        _REASONS[module] = "the kernels library kept the original (DISABLE_KERNEL_MAPPING or a condition of the class)"


def _swappable_experts(fit: list[nn.Module], kernel: Kernel, mode: Mode | None) -> list[nn.Module]:
    differentiable = supports_gradient(kernel)
    compilable = getattr(kernel.module.experts_forward, "can_torch_compile", True)
    reason = _unfit_for_mode(differentiable, compilable, mode)
    chosen = []
    for module in fit:
        why_not = reason or experts.probe(module, kernel)
        if why_not is None:
            chosen.append(module)
        else:
            _REASONS[module] = why_not
    if not differentiable and any(module.training for module in chosen):
        _tell_once(kernel)
    return chosen


def _unfit_for_mode(differentiable: bool, compilable: bool, mode: Mode | None) -> str | None:
    if mode is None:
        return None
    from kernels import Mode

    if Mode.TRAINING in mode and not differentiable:
        return "the kernel has no backward and mode is TRAINING"
    if Mode.TORCH_COMPILE in mode and not compilable:
        return "the kernel does not support torch.compile and mode has TORCH_COMPILE"
    return None


_TOLD: set[str] = set()


def _tell_once(kernel: Kernel) -> None:
    if kernel.repo_id not in _TOLD:
        _TOLD.add(kernel.repo_id)
        logger.warning(
            "kernelize: %s has no backward: wherever gradients are needed the original layer runs; the kernel runs "
            "in evaluation under torch.no_grad() or torch.inference_mode().",
            kernel.repo_id,
        )


def _describe(path: str, module: nn.Module) -> LayerReport:
    original = type(module).__name__
    if not state.is_swapped(module):
        return LayerReport(path, original, swapped=False, reason=_reason(module))
    record = state.record_of(module)
    kernel = record.kernel
    return LayerReport(
        path,
        original,
        swapped=True,
        kernel=kernel.repo_id,
        layer=record.layer,
        version=kernel.version,
        source=kernel.source,
        runs=path_of(kernel, _device_of(module) or "cpu"),
    )


def _reason(module: nn.Module) -> str:
    if state.record_of(module) is not None and state.record_of(module).kernel is not None:
        return "its kernel was lost, by pickling or by a later change; call kernelize again"
    if module in _REASONS:
        return _REASONS[module]
    found = norms.recognise(module) if _kind(module) == NORM else experts.recognise(module)
    return found if isinstance(found, str) else "kernelize was not called"


def _device_of(module: nn.Module) -> torch.device | None:
    parameter = next(module.parameters(), None)
    return None if parameter is None else parameter.device


def _verify(model: nn.Module, report: Report, inputs: Any) -> None:
    measured = compare_layers(model, inputs)
    for layer in report.swapped:
        layer.inputs, layer.max_abs_error, layer.max_rel_error, layer.tolerance = measured[layer.path]
    wrong = [layer for layer in report.swapped if not layer.max_rel_error <= layer.tolerance]
    if wrong:
        worst = max(
            wrong, key=lambda layer: float("inf") if layer.max_rel_error != layer.max_rel_error else layer.max_rel_error
        )
        raise VerificationError(
            f"kernelize: {len(wrong)} of {len(report.swapped)} swapped layers differ from the original by more than "
            f"rounding explains. Largest: {worst.path or '(model)'} ({worst.original}, {worst.kernel}): relative error "
            f"{worst.max_rel_error:.1e}, tolerance {worst.tolerance:.1e}, {worst.inputs} inputs. The model was put back; "
            f"kernelize(model, kernels=[...]) can leave this kind of layer out."
        )


def _nothing_swapped(report: Report, strict: bool) -> None:
    if not report.layers:
        text = f"kernelize: {report.model} has no RMSNorm layer and no experts; nothing was swapped."
    else:
        first = report.layers[0]
        text = (
            f"kernelize: none of the {len(report.layers)} layers of {report.model} that a kernel could serve was swapped. "
            f"The first, {first.path or '(model)'}: {first.reason}. print(explain(model)) lists all."
        )
    if strict:
        raise NothingSwapped(text)
    warnings.warn(text, NothingSwappedWarning, stacklevel=4)
