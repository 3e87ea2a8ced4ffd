"""A function that is fetched at its first call, also if that call is being compiled."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


def fetched_at_first_call(fetch: Callable[[], Callable]) -> Callable:
    """A function that calls `fetch()()`, with its own arguments; `fetch` is called once."""
    import torch

    entry = _Entry()

    @torch.compiler.assume_constant_result  # loading is no part of a graph: done while tracing, nothing of it is kept
    def ready() -> bool:
        if entry.function is None:
            with _outside_of_tracing():
                entry.function = fetch()
        return True

    def call(*args: Any, **kwargs: Any) -> Any:
        ready()
        return entry.function(*args, **kwargs)

    return call


class _Entry:
    """Holds the function once it is fetched. A class, since torch.compile reads attributes late."""

    function: Any = None


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
