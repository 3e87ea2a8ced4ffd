"""What happened to each layer: data first, one printed line per layer second."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field


@dataclass
class LayerReport:
    """One layer of the model that a kernel exists for, or that looks as if one should."""

    path: str  # as in model.named_modules(); "" is the model itself
    original: str  # class of the layer, which it keeps
    swapped: bool
    kernel: str | None = None  # repo id
    layer: str | None = None  # layer or function of the kernel
    version: int | None = None
    source: str | None = None  # where the kernel was loaded from
    loaded: bool = True  # False: it loads at the first call, as experts_implementation="pallas" does
    runs: str | None = None  # pallas | torch | interpret | jax: the path a call takes on the layer's device, now
    reason: str | None = None  # why it was left alone
    inputs: str | None = None  # what verify compared on: "captured" (the layer's own inputs), "random" or "none"
    max_abs_error: float | None = None
    max_rel_error: float | None = None  # largest difference over the largest value of the original's result
    tolerance: float | None = None  # for max_rel_error

    @property
    def within_tolerance(self) -> bool:
        """False also for a NaN, and for a layer that was not compared."""
        return self.max_rel_error is not None and self.tolerance is not None and self.max_rel_error <= self.tolerance

    @property
    def error_rank(self) -> float:
        """max_rel_error in an order that can be sorted: a NaN is the largest."""
        error = -1.0 if self.max_rel_error is None else self.max_rel_error
        return math.inf if math.isnan(error) else error

    def __str__(self) -> str:
        name = f"{self.path or '(model)'}  {self.original}"
        if not self.swapped:
            return f"{name}  original: {self.reason}"
        version = "" if self.version is None else f" v{self.version}"
        source = "" if self.source is None else f" from {self.source}"
        runs = f"runs {self.runs}" if self.loaded else "loads at its first call"
        text = f"{name}  {self.kernel}{version}:{self.layer}{source}, {runs}"
        if self.max_rel_error is not None:
            text += f", error {self.max_rel_error:.1e} (tolerance {self.tolerance:.1e}, {self.inputs} inputs)"
        elif self.inputs == "none":
            text += ", not compared"
        return text


@dataclass
class Report:
    """The layers in the order of model.named_modules()."""

    model: str
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def swapped(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.swapped]

    @property
    def left_alone(self) -> list[LayerReport]:
        return [layer for layer in self.layers if not layer.swapped]

    @property
    def largest_error(self) -> LayerReport | None:
        """The layer whose result moved most, if verify was asked for."""
        measured = [layer for layer in self.layers if layer.max_rel_error is not None]
        return max(measured, key=lambda layer: layer.error_rank, default=None)

    def to_dict(self) -> dict:
        return {"model": self.model, "swapped": len(self.swapped), "layers": [asdict(layer) for layer in self.layers]}

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, path: str) -> LayerReport:
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise KeyError(path)

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.swapped)} of {len(self.layers)} layers run Hub kernels"]
        lines += [f"  {layer}" for layer in self.layers]
        worst = self.largest_error
        if worst is not None:
            lines.append(f"  largest error: {worst.max_rel_error:.1e} in {worst.path or '(model)'}")
        return "\n".join(lines)
