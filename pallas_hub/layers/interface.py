"""experts_implementation="pallas": the entry in Transformers' own table of experts functions.

    import pallas_hub                                                   # before or after transformers
    AutoModelForCausalLM.from_config(config, experts_implementation="pallas")

Transformers checks the name against ALL_EXPERTS_FUNCTIONS of transformers.integrations.moe, so the entry must be there
before a model is built. If that module is imported already, the entry is made at once; if not, a finder on
sys.meta_path waits for its import, makes the entry and takes itself off. Neither Transformers nor torch is imported
for this. The kernel itself is loaded at the first call, or by kernelize.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pallas_hub.layers.loading import DEFAULT_REPOS, EXPERTS, Kernel, load_kernel

if TYPE_CHECKING:
    import torch
    from torch import nn

NAME = "pallas"
_TABLE_MODULE = "transformers.integrations.moe"


def register() -> None:
    """Enter "pallas" in Transformers' table of experts functions. Imports Transformers; twice is the same as once."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    _enter(ALL_EXPERTS_FUNCTIONS)


def register_when_imported() -> None:
    """Do what register() does, as soon as somebody else imports Transformers' experts interface."""
    module = sys.modules.get(_TABLE_MODULE)
    if module is not None and hasattr(module, "ALL_EXPERTS_FUNCTIONS"):
        _enter(module.ALL_EXPERTS_FUNCTIONS)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def implementation_for(kernel: Kernel, *, default: bool) -> str:
    """The name in the table under which this kernel's experts run: "pallas" if it is what nobody chose."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if default and (not _DEFAULT or _DEFAULT[0].module is kernel.module):
        _DEFAULT[:] = [kernel]
        _enter(ALL_EXPERTS_FUNCTIONS)
        return NAME
    name = f"{NAME}:{kernel.repo_id}" + ("" if kernel.version is None else f"@{kernel.version}")
    taken, number = name, 1
    while name in _OTHERS and _OTHERS[name].module is not kernel.module:  # other code of that repo: a model may run it
        number += 1
        name = f"{taken}#{number}"
    if name not in _OTHERS:
        _OTHERS[name] = kernel
        ALL_EXPERTS_FUNCTIONS.register(name, _experts_function(lambda: kernel))
    return name


def kernel_behind(implementation: str | None) -> Kernel | None:
    """The kernel that Transformers runs under this setting; None for a setting of its own. Loads nothing."""
    if implementation == NAME:
        return _DEFAULT[0] if _DEFAULT else Kernel(DEFAULT_REPOS[EXPERTS], None, None, None)
    return _OTHERS.get(implementation)


def supports_gradient(kernel: Kernel) -> bool:
    return getattr(kernel.module.experts_forward, "has_backward", True)


_DEFAULT: list[Kernel] = []  # the kernel behind "pallas", once it is loaded
_OTHERS: dict[str | None, Kernel] = {}  # name in the table -> kernel, for kernels that were asked for by name


def _enter(table: Any) -> None:
    if NAME not in table:
        table.register(NAME, _experts_function(_load_default))


def _load_default() -> Kernel:
    if not _DEFAULT:
        _DEFAULT.append(load_kernel(DEFAULT_REPOS[EXPERTS]))
    return _DEFAULT[0]


@contextmanager
def _outside_of_tracing() -> Generator[None]:
    """get_kernel refuses to be traced into a graph. When `ready` calls it, the compiler waits for it instead."""
    import torch

    compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = compiling


class _Entry:
    """Holds the kernel's function once it is loaded. A class, since torch.compile reads attributes late."""

    forward: Any = None


def _experts_function(kernel_of: Callable[[], Kernel]) -> Callable:
    """A function for the table, which loads the kernel at its first call, also if that call is being compiled."""
    import torch

    entry = _Entry()

    @torch.compiler.assume_constant_result  # loading is no part of a graph: done while tracing, nothing of it is kept
    def ready() -> bool:
        if entry.forward is None:
            with _outside_of_tracing():
                kernel = kernel_of()
            forward = kernel.module.experts_forward
            entry.forward = forward if supports_gradient(kernel) else _with_gradient_from_transformers(forward)
        return True

    def experts_forward(
        self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        ready()
        return entry.forward(self, hidden_states, top_k_index, top_k_weights)

    return experts_forward


def _with_gradient_from_transformers(forward: Callable) -> Callable:
    def experts_forward(self, hidden_states, top_k_index, top_k_weights):
        from transformers.integrations.moe import grouped_mm_experts_forward

        from pallas_hub.layers.repository import needs_gradient

        chosen = grouped_mm_experts_forward if needs_gradient(self, hidden_states, top_k_weights) else forward
        return chosen(self, hidden_states, top_k_index, top_k_weights)

    return experts_forward


class _AfterImport:
    """Finds transformers.integrations.moe once, and lets register() follow its execution."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _TABLE_MODULE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run_module = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run_module(module)
            _enter(module.ALL_EXPERTS_FUNCTIONS)

        spec.loader.exec_module = exec_module
        return spec
