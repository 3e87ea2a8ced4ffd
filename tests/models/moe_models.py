"""Which files of the installed Transformers have experts behind its experts interface.

Found by reading the installation, so that a new version brings its new models along by itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

MODELS = Path(transformers.__file__).parent / "models"
# Classes with a head, best first: logits, a loss, generation.
HEADS = ("ForCausalLM", "ForConditionalGeneration", "For")


@dataclass(frozen=True)
class Case:
    """One class of experts. Nearly every file has one."""

    folder: str  # of the model, such as qwen3_moe
    path: Path
    experts: str  # name of the class

    def __str__(self) -> str:
        return self.folder if self is cases_of(self.path)[0] else f"{self.folder}-{self.experts}"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"transformers.models.{self.folder}.{self.path.stem}")

    @property
    def experts_class(self) -> type[nn.Module]:
        return getattr(self.module, self.experts)

    @property
    def model_classes(self) -> list[type[PreTrainedModel]]:
        """The classes of the file that have a head, best first."""
        found = [cls for cls in _models_in(self.module) if _rank(cls) < len(HEADS)]
        return sorted(found, key=_rank)


def _models_in(module: ModuleType) -> list[Any]:
    return [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module.__name__
        and value.__name__ == name  # not an old name for another
    ]


def _rank(cls: type) -> int:
    return next((rank for rank, head in enumerate(HEADS) if head in cls.__name__), len(HEADS))


@functools.cache
def cases_of(path: Path) -> tuple[Case, ...]:
    source = path.read_text(encoding="utf-8")
    names = re.findall(r"^@use_experts_implementation\b[^\n]*\n(?:@[^\n]*\n)*class (\w+)", source, re.MULTILINE)
    return tuple(Case(path.parent.name, path, name) for name in names)


@functools.cache
def model_files() -> tuple[Path, ...]:
    return tuple(path for path in sorted(MODELS.glob("*/modeling_*.py")) if cases_of(path))


@functools.cache
def cases() -> tuple[Case, ...]:
    return tuple(case for path in model_files() for case in cases_of(path))
