"""Which code runs for a tensor: chosen by its device, forced by `use_path`, told by `record_paths`.

| tensor on | "auto" takes |
| --- | --- |
| tpu | "pallas": the kernel, compiled, through torch_tpu |
| cuda | "torch": the op's torch function |
| cpu | "torch"; "jax" (jitted JAX) for an op without a torch function |
| cpu, PALLAS_HUB_INTERPRET=1 | "interpret": the very Pallas TPU kernel, interpreted; "jax" if the op has none |

PALLAS_HUB_PATH sets another default than "auto". A path that can't run is an error; there is no way
from one path to another behind the user's back.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from .state import state

PATHS = ("auto", "pallas", "torch", "interpret", "jax")


@contextmanager
def use_path(path: str, *, interpret: Any = True) -> Generator[None]:
    """Take `path` for every kernel in this thread or task, and for the backward of what runs inside.

    interpret   what "interpret" hands to pallas_call: True, or a pltpu.InterpretParams
    """
    token = state.forced.set((_known(path, "use_path"), interpret))
    try:
        yield
    finally:
        state.forced.reset(token)


@contextmanager
def record_paths() -> Generator[list[tuple[str, str]]]:
    """Collect (op, path) of every kernel call that really ran, in whatever thread, backward included."""
    ran: list[tuple[str, str]] = []
    state.recorders.append(ran)
    try:
        yield ran
    finally:
        state.recorders[:] = [other for other in state.recorders if other is not ran]


def requested() -> tuple[str, Any]:
    """(path, interpret) as asked for by `use_path` or else by the environment, read at every call."""
    forced = state.forced.get()
    if forced is not None:
        return forced
    path = _environment.get(_PATH)
    if path:
        return _known(os.fsdecode(path), "PALLAS_HUB_PATH"), True
    if _environment.get(_INTERPRET, b"") not in _OFF:
        return "interpret-on-cpu", True
    return "auto", True


# os.environ.get encodes the name and, for one that is not set, raises inside: 0.8 us, each time.
_environment = os.environ._data  # type: ignore[attr-defined]
_PATH, _INTERPRET = (os.environ.encodekey(name) for name in ("PALLAS_HUB_PATH", "PALLAS_HUB_INTERPRET"))
_OFF = (b"", b"0", "", "0")


def _known(path: str, who: str) -> str:
    if path not in PATHS:
        raise ValueError(f'{who}: path must be one of {", ".join(PATHS)}; got "{path}".')
    return path


def choose(op: Any, device: str, path: str) -> str:
    """The path of `op` on `device` when `path` is asked for. `op` has torch_fn and is_pallas()."""
    if path == "interpret-on-cpu":
        path = "interpret" if device == "cpu" else "auto"
    if path == "auto":
        path = _automatic(op, device)
    if path == "torch":
        if op.torch_fn is None:
            raise NotImplementedError(f"{op.name}: has no torch path; it runs on tpu, and on cpu through JAX.")
        return path
    if path == "pallas":
        if device != "tpu":
            raise RuntimeError(
                f'{op.name}: path "pallas" needs tensors on tpu; got {device}. '
                f'On cpu, use_path("interpret") runs the same kernel interpreted.'
            )
        return path
    if device != "cpu":
        raise RuntimeError(f'{op.name}: path "{path}" runs on cpu only; got tensors on {device}. Try .cpu().')
    if path == "interpret":
        return "interpret" if op.is_pallas() else "jax"
    if op.is_pallas():
        raise RuntimeError(
            f'{op.name}: path "jax" can\'t compile a Pallas kernel for cpu. use_path("interpret") interprets it.'
        )
    return path


def _automatic(op: Any, device: str) -> str:
    if device == "tpu":
        return "pallas"
    if op.torch_fn is not None or device != "cpu":
        return "torch"
    return "jax"


def requested_by_context() -> Any:
    """What `use_path` asked for, to be handed to `under` later, possibly in another thread."""
    return state.forced.get()


@contextmanager
def under(forced: Any) -> Generator[None]:
    """Run a backward as its forward was: forced if that was forced, else as asked for right now."""
    if forced is None:
        yield
        return
    token = state.forced.set(forced)
    try:
        yield
    finally:
        state.forced.reset(token)
