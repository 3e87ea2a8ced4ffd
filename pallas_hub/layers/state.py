"""The mark that a swapped module carries, how it is set and how it is taken off.

Everything kernelize changes on a module is written down in the module's own __dict__ under RECORD, so that a deep
copy of the model takes it along and unkernelize of the copy works like that of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from pallas_hub.layers.loading import Kernel

RECORD = "_pallas_hub"
ABSENT = "absent"  # a word, not object(): it must survive deepcopy and pickle


@dataclass
class Record:
    kernel: Kernel | None = None  # None: only a config was exchanged on this module
    layer: str | None = None  # layer or function of the kernel
    old_forward: Any = ABSENT  # what __dict__["forward"] was
    changes_forward: bool = False
    old_values: dict[str, Any] = field(default_factory=dict)  # other entries of __dict__ that were exchanged
    new_values: dict[str, Any] = field(default_factory=dict)
    implementation: str | None = None  # of experts: the name that stands in the config; of attention: the backend
    setting: str = "_experts_implementation"  # the config's attribute in which it stands
    changes_processor: bool = False  # of a Diffusers attention layer, whose processor had `old_backend` in __dict__
    old_backend: Any = ABSENT


def record_of(module: nn.Module) -> Record | None:
    return module.__dict__.get(RECORD)


def is_swapped(module: nn.Module) -> bool:
    """True if a call of the module runs a kernel (a pickled and loaded layer carries the mark but does not)."""
    record = record_of(module)
    if record is None or record.kernel is None:
        return False
    if record.changes_forward:
        return not has_class_forward(module)
    if record.changes_processor:
        return getattr(getattr(module, "processor", None), "_attention_backend", None) == record.implementation
    config = module.__dict__.get("config")
    return getattr(config, record.setting, None) == record.implementation


def has_class_forward(module: nn.Module) -> bool:
    """True if a call runs the forward of the module's class, even if it is bound on the instance."""
    forward = module.__dict__.get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def bind_forward(module: nn.Module, forward: Callable, kernel: Kernel, layer: str) -> None:
    old = module.__dict__.get("forward", ABSENT)
    module.__dict__["forward"] = MethodType(forward, module)
    note_forward(module, old, kernel, layer)


def note_forward(module: nn.Module, old_forward: Any, kernel: Kernel, layer: str) -> None:
    """Write down a forward that was bound already, over `old_forward`."""
    module.__dict__[RECORD] = Record(kernel=kernel, layer=layer, old_forward=old_forward, changes_forward=True)


def exchange_value(module: nn.Module, name: str, value: Any) -> None:
    record = module.__dict__.setdefault(RECORD, Record())
    record.old_values[name] = module.__dict__[name]
    record.new_values[name] = value
    module.__dict__[name] = value


def restore_forward(module: nn.Module) -> None:
    record = record_of(module)
    if record is None or not record.changes_forward:
        return
    if isinstance(record.old_forward, str):  # ABSENT
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = record.old_forward
