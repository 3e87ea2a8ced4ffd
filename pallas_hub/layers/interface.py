"""experts_implementation="pallas": the entry in Transformers' own table of experts functions.

    import pallas_hub                                                   # before or after transformers
    AutoModelForCausalLM.from_config(config, experts_implementation="pallas")

Transformers checks the name against ALL_EXPERTS_FUNCTIONS of transformers.integrations.moe, so the entry must be there
before a model is built: at once if that module is imported already, else as soon as it is. Neither Transformers nor
torch is imported for this. The kernel itself is loaded at the first call, or by kernelize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_hub.layers.after_import import after_import
from pallas_hub.layers.first_call import fetched_at_first_call
from pallas_hub.layers.loading import DEFAULT_REPOS, EXPERTS, Kernel, load_kernel

NAME = "pallas"
_TABLE_MODULE = "transformers.integrations.moe"


def register() -> None:
    """Enter "pallas" in Transformers' table of experts functions. Imports Transformers; twice is the same as once."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    _enter(ALL_EXPERTS_FUNCTIONS)


def register_when_imported() -> None:
    """Do what register() does, as soon as somebody else imports Transformers' experts interface."""
    after_import(_TABLE_MODULE, "ALL_EXPERTS_FUNCTIONS", lambda module: _enter(module.ALL_EXPERTS_FUNCTIONS))


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


def _experts_function(kernel_of: Callable[[], Kernel]) -> Callable:
    """A function for the table, which loads the kernel at its first call, also if that call is being compiled."""

    def fetch() -> Callable:
        kernel = kernel_of()
        forward = kernel.module.experts_forward
        return forward if supports_gradient(kernel) else _with_gradient_from_transformers(forward)

    return fetched_at_first_call(fetch)


def _with_gradient_from_transformers(forward: Callable) -> Callable:
    def experts_forward(self, hidden_states, top_k_index, top_k_weights):
        from transformers.integrations.moe import grouped_mm_experts_forward

        from pallas_hub.layers.repository import needs_gradient

        chosen = grouped_mm_experts_forward if needs_gradient(self, hidden_states, top_k_weights) else forward
        return chosen(self, hidden_states, top_k_index, top_k_weights)

    return experts_forward
