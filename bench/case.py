"""One table of a benchmark: a job at one size, who does it, and what came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pallas_hub.bench.checks import Check
from pallas_hub.bench.timing import Timing


@dataclass(frozen=True)
class Implementation:
    """One way to do the job. `call` takes nothing and returns the result."""

    name: str
    call: Callable[[], Any]
    ours: bool = False
    memory_bytes: int = 0  # what it allocates on top of the inputs; checked before it runs
    path: str = ""  # what runs, where neither the bridge nor an operator name tells
    telling_ops: tuple[str, ...] = ()  # operators whose presence names the path


def without_gradients(row: Implementation) -> Implementation:
    """The same implementation under torch.no_grad, as in inference."""
    import torch

    return replace(row, call=torch.no_grad()(row.call))


@dataclass
class Case:
    """A job at one size and dtype, with all its implementations and the exact answer."""

    workload: str
    sizes: dict[str, int]
    dtype: str
    exact: Callable[[], Any]  # float64 result
    tolerance: float
    least_bytes: int  # what any implementation has to read and write
    stream: Callable[[], Any]  # moves `least_bytes` and does nothing else
    stream_name: str
    implementations: list[Implementation]
    unavailable: dict[str, str] = field(default_factory=dict)  # name -> why it is not in the table

    @property
    def title(self) -> str:
        return f"{self.workload}, {', '.join(f'{k}={v}' for k, v in self.sizes.items())}, {self.dtype}"


@dataclass(frozen=True)
class Row:
    """One line of the table. Without a passed check there is no timing."""

    name: str
    ours: bool = False
    check: Check | None = None
    first_s: float = 0.0  # the call that was checked: the very first one
    timing: Timing | None = None
    path: str = ""
    skipped: str | None = None  # why it did not run
    error: str | None = None  # what it raised

    @property
    def failed(self) -> bool:
        return self.error is not None or (self.check is not None and not self.check.passed)

    @property
    def why_not(self) -> str | None:
        """Why there is no timing."""
        if self.check is not None and self.check.problem:
            return f"check failed: {self.check.problem}"
        return self.error or self.skipped


@dataclass(frozen=True)
class CaseResult:
    case: Case
    rows: list[Row]
    stream: Timing | None  # None when nothing was left to time

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)

    @property
    def timed(self) -> list[tuple[Row, Timing]]:
        return [(row, row.timing) for row in self.rows if row.timing]

    def best_other(self, row: Row) -> tuple[Row, Timing] | None:
        """The fastest of all other rows."""
        others = [pair for pair in self.timed if pair[0].name != row.name]
        return min(others, key=lambda pair: pair[1].median_s, default=None)

    def speed(self, row: Row) -> float | None:
        """How many times as fast as the best of the others."""
        best = self.best_other(row)
        return best[1].median_s / row.timing.median_s if best and row.timing else None

    def bandwidth(self, timing: Timing) -> float:
        """Least possible bytes per second of this timing."""
        return self.case.least_bytes / timing.median_s

    def share(self, row: Row) -> float | None:
        """Achieved bandwidth over that of the streaming run of the same size in the same rounds."""
        return self.stream.median_s / row.timing.median_s if self.stream and row.timing else None
