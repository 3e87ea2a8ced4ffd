"""What all copies of the bridge in one process share.

Every published kernel carries its own copy of this package, so module globals would not do: forcing a
path must reach all of them. The state lives in a small module of its own, made by whoever comes first.
"""

from __future__ import annotations

import contextvars
import os
import sys
import types
from typing import Any

NAME = "_pallas_hub_bridge_state_1"  # raise the number when the fields below change meaning


def _make() -> Any:
    state: Any = types.ModuleType(NAME, "Shared by all copies of the pallas-hub torch bridge.")
    state.forced = contextvars.ContextVar("pallas_hub_path", default=None)  # (path, interpret) or None
    state.recorders = []  # lists that collect (op, path)
    state.owners = {}  # torch namespace -> the copy of a kernel that it belongs to
    state.forked_after_jax = False

    jax_was_up = False

    def before() -> None:
        nonlocal jax_was_up
        jax_was_up = state.forked_after_jax or jax_has_started()

    def after_in_child() -> None:
        state.forked_after_jax = jax_was_up

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_child=after_in_child)
    return state


def jax_has_started() -> bool:
    # JAX has no public way to ask without starting a backend.
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge and bridge._backends)


state = sys.modules.get(NAME) or sys.modules.setdefault(NAME, _make())
