"""Right before fast: compare a result with the exact one, and see which path produced it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """Outcome of one comparison. `error` is max |got - exact| / max |exact|."""

    error: float
    tolerance: float
    problem: str | None = None  # why it failed, in words

    @property
    def passed(self) -> bool:
        return self.problem is None


def compare(got: Any, exact: Any, tolerance: float) -> Check:
    """Compare a result (torch tensor, JAX or numpy array) with the float64 tensor `exact`."""
    values = to_float64(got)
    if values.shape != exact.shape:
        problem = f"shape is {tuple(values.shape)}, must be {tuple(exact.shape)}"
        return Check(math.inf, tolerance, problem)
    if exact.numel() == 0:
        return Check(0.0, tolerance)
    scale = exact.abs().max().item() or 1.0
    error = (values - exact).abs().max().item() / scale
    if math.isnan(error):
        return Check(error, tolerance, "result holds NaN")
    if error > tolerance:
        return Check(error, tolerance, f"error {error:.2e} is above {tolerance:.2e}")
    return Check(error, tolerance)


def to_float64(value: Any) -> Any:
    """A float64 torch tensor on the CPU."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", torch.float64)
    import numpy

    return torch.from_numpy(numpy.array(value, dtype=numpy.float64))


def tolerance_for(dtype: Any, sum_length: int) -> float:
    """How far a right result may lie from the exact one, relative to the largest entry.

    Two sources: the result and the intermediate values are rounded to `dtype` (up to four roundings that add up), and
    a float32 sum of `sum_length` terms is off by about sqrt(sum_length) roundings.
    """
    import torch

    return 4 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * math.sqrt(sum_length)


@contextmanager
def recorded_torch_ops() -> Generator[list[str]]:
    """List the names of the torch operators that run inside, so that a rival's own fallback shows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield names


def run_and_name_path(
    call: Callable[[], Any], record_paths: Callable[[], Any] | None, telling_ops: tuple[str, ...] = ()
) -> tuple[Any, str]:
    """Run once; return the result and the path that really ran.

    With `record_paths` (of a kernel's bridge) the bridge says it; otherwise the first of `telling_ops` that ran.
    """
    if record_paths is not None:
        with record_paths() as ran:
            result = call()
        return result, ", ".join(dict.fromkeys(f"{op.split('::')[-1]}: {path}" for op, path in ran)) or "not recorded"
    if not telling_ops:
        return call(), ""
    with recorded_torch_ops() as names:
        result = call()
    seen = set(names)
    return result, next((op for op in telling_ops if op in seen), "none of " + ", ".join(telling_ops))
