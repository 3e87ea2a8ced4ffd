"""What the tests of quantised weights share: weights made by the rule in stored.py, and what they mean. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from moe_experts.cases import Case
from moe_experts_checks import Layer, layer_of


@dataclass(frozen=True)
class Format:
    dtype: str  # of data
    rows: int  # that share a scale; 0: all
    columns: int


FORMATS = {
    "int8": Format("int8", 0, 1),
    "int8-tensor": Format("int8", 0, 0),
    "int8-g64": Format("int8", 64, 1),
    "fp8": Format("float8_e4m3fn", 0, 1),
    "fp8-tensor": Format("float8_e4m3fn", 0, 0),
    "fp8-block": Format("float8_e4m3fn", 128, 128),
    "int4": Format("uint8", 128, 1),
    "int4-g64": Format("uint8", 64, 1),
    "int4-g32": Format("uint8", 32, 1),
    "int4-column": Format("uint8", 0, 1),
}


@dataclass
class Quantized:
    """A layer with quantised weights (e, in, out): its arguments in the kernel's order, and what they stand for."""

    layer: Layer  # whose weights are the values
    data: tuple[Any, Any]
    scales: tuple[Any, Any]

    def arguments(self) -> tuple:
        part = self.layer
        return part.x, *self.data, part.index, part.weights, part.gate_up_bias, part.down_bias, *self.scales


def quantized_layer(case: Case, formats: tuple[str, str], seed: int = 0, index: Any = None) -> Quantized:
    """gate_up in the first format, down in the second."""
    assert case.transposed
    layer, draw = layer_of(case, seed, index), np.random.default_rng(seed + 1)
    first, second = (FORMATS[name] for name in formats)
    gate_up = draw_weight(layer.gate_up.shape, first, draw, 2 * case.h**-0.5)
    down = draw_weight(layer.down.shape, second, draw, case.i**-0.5)
    values = {"gate_up": value_of(*gate_up, first, case.h), "down": value_of(*down, second, case.i)}
    return Quantized(replace(layer, **values), (gate_up[0], down[0]), (gate_up[1], down[1]))


def draw_weight(shape: tuple[int, int, int], form: Format, draw: Any, size: float) -> tuple[Any, Any]:
    """Any data, with scales from a half to two of what makes the weight about `size`."""
    e, rows, columns = shape
    if form.dtype == "float8_e4m3fn":
        data = (draw.standard_normal(shape) * 16).astype(ml_dtypes.float8_e4m3fn)
        deviation = 16.0
    else:
        low, high = (-128, 128) if form.dtype == "int8" else (-8, 8)
        data, deviation = draw.integers(low, high, shape).astype(np.int8), high / 3**0.5
    if form.dtype == "uint8":
        data = pack(data)
    a, b = (1 if block == 0 else -(-size // block) for size, block in ((rows, form.rows), (columns, form.columns)))
    return data, (size / deviation * 2.0 ** draw.uniform(-1, 1, (e, a, b))).astype(np.float32)


def pack(numbers: Any) -> Any:
    """(e, rows, columns) int8 -> (e, ceil(rows / 2), columns) uint8, byte by byte."""
    e, rows, columns = numbers.shape
    packed = np.zeros((e, -(-rows // 2), columns), np.uint8)
    for row in range(rows):
        packed[:, row // 2] |= (numbers[:, row].astype(np.uint8) & 15) << (4 * (row % 2))
    return packed


def value_of(data: Any, scale: Any, form: Format, rows: int) -> Any:
    """The weight (e, rows, columns) in float64, number by number of a column."""
    columns = data.shape[2]
    values = np.zeros((data.shape[0], rows, columns))
    for row in range(rows):
        if form.dtype == "uint8":
            half = data[:, row // 2].astype(np.int64) >> (4 * (row % 2)) & 15
            number = np.where(half > 7, half - 16, half).astype(np.float64)
        else:
            number = data[:, row].astype(np.float64)
        scales = scale[:, row // form.rows if form.rows else 0]
        values[:, row] = number * (scales[:, np.arange(columns) // form.columns] if form.columns else scales)
    return values
