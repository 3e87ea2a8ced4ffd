"""kernelize, explain, unkernelize: decide for every layer, change the instances, and take all of it back."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pallas_hub.layers import experts, norms, processors, routers, state
from pallas_hub.layers.errors import NothingSwapped, NothingSwappedWarning, VerificationError
from pallas_hub.layers.loading import ATTENTION, EXPERTS, NORM, ROUTER, KernelChoice, choose_kernels, path_of
from pallas_hub.layers.pipeline import as_module, name_of
from pallas_hub.layers.place import REASONS, device_of, kind_of, put_attention, put_kernels
from pallas_hub.layers.report import LayerReport, Report
from pallas_hub.layers.verify import compare_layers

if TYPE_CHECKING:
    from kernels import Mode


def kernelize(
    model: nn.Module | Any,
    *,
    kernels: KernelChoice = None,
    mode: Mode | None = None,
    device: str | torch.device | None = None,
    verify: bool | Any = False,
    strict: bool = False,
) -> Report:
    """Let the RMSNorm, experts and attention layers of `model` run Hub kernels. Changes this model only, and in place.

    model    a module, or a Diffusers pipeline
    kernels  what to swap and by which kernel: None (all defaults), kinds such as ["RMSNorm"], or a dict such as
             {"RMSNorm": "org/name@1", "experts": None}; values may be loaded kernel modules
    mode     a kernels.Mode, when the use is fixed; None: right in training and evaluation, whichever comes
    device   where the layers will run, if not where they are now
    verify   True: compare each swapped layer with its original on its own inputs, from a run on the model's
             dummy_inputs (random inputs for layers that this does not reach); model inputs (dict, tuple or
             tensor): from a run on these. Not attention of Transformers, which can't run twice on one cache
    strict   raise NothingSwapped, instead of a warning, if no layer was swapped
    Raises   VerificationError: a result differs by more than rounding explains; the model is as before.
    """
    chosen = choose_kernels(kernels)
    model = as_module(model)
    unkernelize(model)  # swapping twice is swapping once, with the kernels of the second call
    try:
        where = None if device is None else _device_of_that_name(device)
        put_kernels(model, chosen, mode, where)
        if ATTENTION in chosen:
            put_attention(model, chosen[ATTENTION], mode, where, asked=kernels is not None and ATTENTION in kernels)
        report = explain(model)
        if verify is not False and verify is not None and report.swapped:
            _verify(model, report, None if verify is True else verify)
        if not report.swapped:
            _nothing_swapped(report, strict)
    except BaseException:
        unkernelize(model)
        raise
    return report


def _device_of_that_name(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"kernelize: device must be one that torch knows; got {device!r}. "
            f"A TPU needs `import torch_tpu` before, and a machine that has one."
        ) from error


def explain(model: nn.Module | Any) -> Report:
    """What each layer runs now, or why it runs its original code. Changes and loads nothing."""
    model = as_module(model)
    report = Report(model=name_of(model))
    elsewhere = device_of(model) or torch.device("cpu")  # of layers without a weight
    for path, module in model.named_modules():
        if kind_of(module) is not None:
            report.layers.append(_describe(path, module, device_of(module) or elsewhere))
    return report


def unkernelize(model: Any) -> Any:
    """Undo kernelize: every instance dictionary and the config are what they were. Undoing twice is undoing once."""
    modules = list(as_module(model).modules())
    marked = [module for module in modules if state.record_of(module) is not None]
    for module in marked:
        state.restore_forward(module)
    experts.restore_configs(marked)
    processors.restore(marked)
    for module in marked:
        del module.__dict__[state.RECORD]
    for module in modules:
        REASONS.pop(module, None)
    return model


def _describe(path: str, module: nn.Module, device: torch.device) -> LayerReport:
    original = type(module).__name__
    record = state.record_of(module)
    kernel, layer = (None, None) if record is None else (record.kernel, record.layer)
    if kernel is None or kernel.module is None or not state.is_swapped(module):
        kernel, layer = experts.kernel_by_setting(module), experts.LAYER
    if kernel is None:
        kernel, layer = processors.kernel_by_setting(module), processors.LAYER
    if kernel is None:
        return LayerReport(path, original, swapped=False, reason=_reason(module))
    return LayerReport(
        path,
        original,
        swapped=True,
        kernel=kernel.repo_id,
        layer=layer,
        version=kernel.version,
        source=kernel.source,
        loaded=kernel.module is not None,
        runs=path_of(kernel, device),
    )


def _reason(module: nn.Module) -> str:
    record = state.record_of(module)
    if record is not None and record.kernel is not None:
        return "its kernel was lost, by pickling or by a later change; call kernelize again"
    if module in REASONS:
        return REASONS[module]
    recognise = {
        NORM: norms.recognise,
        EXPERTS: experts.recognise,
        ATTENTION: processors.recognise,
        ROUTER: routers.recognise,
    }
    found = recognise[kind_of(module) or NORM](module)
    return found if isinstance(found, str) else "kernelize was not called"


def _verify(model: nn.Module, report: Report, inputs: Any) -> None:
    measured = compare_layers(model, inputs)
    for layer in report.swapped:
        layer.inputs = "none"
    swapped = [report[path] for path in measured]  # and not experts that run a kernel by setting, without kernelize
    for layer in swapped:
        layer.inputs, layer.max_abs_error, layer.max_rel_error, layer.tolerance = measured[layer.path]
    wrong = [layer for layer in swapped if not layer.within_tolerance]
    worst = max(wrong, key=lambda layer: layer.error_rank, default=None)
    if worst is not None:
        raise VerificationError(
            f"kernelize: {len(wrong)} of {len(swapped)} swapped layers differ from the original by more than "
            f"rounding explains. Largest: {worst.path or '(model)'} ({worst.original}, {worst.kernel}): relative error "
            f"{worst.max_rel_error:.1e}, tolerance {worst.tolerance:.1e}, {worst.inputs} inputs. The model was put "
            f"back; kernelize(model, kernels=[...]) can leave this kind of layer out."
        )


def _nothing_swapped(report: Report, strict: bool) -> None:
    if not report.layers:
        text = (
            f"kernelize: {report.model} has no RMSNorm layer, no experts, no router and no attention of Diffusers; "
            "nothing was swapped."
        )
    else:
        # A router on a CPU is left alone by intent: what hinders the other layers is the news.
        first = next((row for row in report.layers if routers.NO_GAIN not in (row.reason or "")), report.layers[0])
        text = (
            f"kernelize: none of the {len(report.layers)} layers of {report.model} that a kernel could serve was "
            f"swapped. The first, {first.path or '(model)'}: {first.reason}. print(explain(model)) lists all."
        )
    if strict:
        raise NothingSwapped(text)
    warnings.warn(text, NothingSwappedWarning, stacklevel=3)
