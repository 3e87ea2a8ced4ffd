"""Attention layers of Diffusers: most processors say to Diffusers which backend to run; the older ones call torch.

The former get our backend. model.set_attention_backend does the same, and also makes it the default of the whole
process, which kernelize does not: other models keep what they have. The latter run with torch's attention redirected
to the kernel, inside the layer only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pallas_hub.layers import state
from pallas_hub.layers.diffusers_backend import backend_for, kernel_behind
from pallas_hub.layers.loading import Kernel

LAYER = "scaled_dot_product_attention"
WIDEST_HEAD = 256
_SETTING = "_attention_backend"


def is_attention(module: Any) -> bool:
    """True for the classes that Diffusers' own set_attention_backend looks at."""
    return "diffusers.models.attention" in sys.modules and isinstance(module, _attention_classes())


@functools.cache
def _attention_classes() -> tuple[type, ...]:
    """Those of them that the installed version has."""
    from diffusers.models import attention, attention_processor

    names = ("AttentionModuleMixin", "Attention", "MochiAttention")
    return tuple(
        getattr(home, name) for home in (attention, attention_processor) for name in names if hasattr(home, name)
    )


def recognise(module: Any) -> str | None:
    """Why the kernel may not stand in for the attention of this layer, or None if it may."""
    processor = getattr(module, "processor", None)
    name = type(processor).__name__
    if _chooses_backend(module):
        needed = getattr(type(processor), _SETTING, None)
        if needed is not None:
            return f"its processor, {name}, needs the backend {needed}"
    elif not state.has_class_forward(module):
        return "its forward was already replaced on the instance"
    elif not _calls_torch(processor):
        return f"its processor, {name}, neither chooses a backend nor calls torch's {LAYER}"
    width, heads = getattr(module, "inner_dim", None), getattr(module, "heads", None)
    if width and heads and width // heads > WIDEST_HEAD:
        return f"its heads are {width // heads} wide; the kernel takes up to {WIDEST_HEAD}"
    return None


def _chooses_backend(module: Any) -> bool:
    return hasattr(getattr(module, "processor", None), _SETTING)


def _calls_torch(processor: Any) -> bool:
    """Itself, or through Diffusers without naming a backend, whose default is torch's attention."""
    code = getattr(type(processor).__call__, "__code__", None)
    names = () if code is None else code.co_names
    return LAYER in names or ("dispatch_attention_fn" in names and "AttentionBackendName" not in names)


def put(modules: list[Any], kernel: Kernel, *, default: bool) -> None:
    for module in modules:
        if not _chooses_backend(module):
            state.bind_forward(module, _redirected(type(module).forward, kernel), kernel, LAYER)
    _choose_backend([module for module in modules if _chooses_backend(module)], kernel, default=default)


class _Redirect(TorchFunctionMode):
    """Calls of torch's scaled_dot_product_attention go to `attend`. Costs some microseconds per torch call inside."""

    def __init__(self, attend: Callable):
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not kwargs.get("dropout_p"):
            return self.attend(*args, **kwargs)
        return func(*args, **kwargs)


def _redirected(original: Callable, kernel: Kernel) -> Callable:
    attend = getattr(kernel.module, LAYER)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Redirect(attend):
            return original(self, *args, **kwargs)

    return forward


def _choose_backend(modules: list[Any], kernel: Kernel, *, default: bool) -> None:
    if not modules:
        return
    backend = backend_for(kernel, default=default)
    # First all, since several layers may share a processor.
    old = {id(module.processor): module.processor.__dict__.get(_SETTING, state.ABSENT) for module in modules}
    for module in modules:
        record = module.__dict__.setdefault(state.RECORD, state.Record())
        record.kernel, record.layer, record.implementation = kernel, LAYER, backend.value
        record.changes_processor, record.old_backend = True, old[id(module.processor)]
        module.processor._attention_backend = backend


def restore(modules: list[Any]) -> None:
    """Give the processors their old setting; one that somebody has changed meanwhile is kept."""
    for module in modules:
        record = state.record_of(module)
        if record is None or not record.changes_processor or not state.is_swapped(module):
            continue
        if record.old_backend == state.ABSENT:
            del module.processor._attention_backend
        else:
            module.processor._attention_backend = record.old_backend


def kernel_by_setting(module: Any) -> Kernel | None:
    """The kernel that this layer runs since Diffusers' own setting says so, with or without kernelize."""
    if not is_attention(module) or not _chooses_backend(module):
        return None
    return kernel_behind(module.processor._attention_backend or _active_backend())


def _active_backend() -> Any:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _AttentionBackendRegistry.get_active_backend()[0]


def run_original(module: Any, args: tuple, kwargs: dict) -> Any:
    """What the layer computed before kernelize; by torch's attention, if that was by a kernel of ours."""
    record = module.__dict__[state.RECORD]
    if not record.changes_processor:
        return type(module).forward(module, *args, **kwargs)
    ours = module.processor._attention_backend
    old = None if record.old_backend == state.ABSENT else record.old_backend
    old = old or _active_backend()
    module.processor._attention_backend = "native" if kernel_behind(old) is not None else old
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module.processor._attention_backend = ours


def tolerance(result: torch.Tensor) -> float:
    """Of the largest difference over the largest value.

    Roundings to the dtype of scores' weights, of the attention and of the projection after it, seen at the largest of
    many values; and float32 sums over keys and channels, whose error grows with the root of their number.
    """
    return 8 * torch.finfo(result.dtype).eps + 4 * torch.finfo(torch.float32).eps * max(result.shape[-2:]) ** 0.5
