"""What the steps of the demo share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

KERNELS = ("rms-norm", "ragged-dot")
ORGANISATION = "pallas-hub"


class StepFailed(RuntimeError):
    """A step's check did not hold."""


@dataclass
class Step:
    """What one step did: facts for machines, lines for people."""

    title: str
    passed: bool = False
    seconds: float = 0.0
    headline: str = ""  # the one result worth repeating in the summary
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Demo:
    """State handed from step to step."""

    say: Callable[[str], None]
    folder: Path
    stack: ExitStack
    workload: str = "qwen3-30b-a3b"  # what to time
    seconds: float = 2.0  # timing budget per table
    tokens: tuple[int, ...] = (1, 8, 64)
    url: str = ""
    kernels: dict[str, ModuleType] = field(default_factory=dict)


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StepFailed(otherwise)


def indent(text: str, most: int | None = None) -> str:
    lines = text.splitlines()
    if most is not None and len(lines) > most:
        lines = [*lines[:most], f"... and {len(lines) - most} more"]
    return "\n".join(f"      {line}" for line in lines)
