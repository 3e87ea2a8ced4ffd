"""What the tests of moe-experts share: inputs for a case, and the layer spelled out in float64. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import erf
from typing import Any

import numpy as np
from moe_experts.cases import Case


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(erf, otypes=[float])(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "swiglu_oss": lambda x: x * _sigmoid(1.702 * x),
}


@dataclass
class Layer:
    """The arguments of a case, float32. Weights are scaled so that every result is about 1."""

    x: Any  # (t, h)
    gate_up: Any  # (e, w, h), or (e, h, w) when transposed
    down: Any  # (e, h, i), or (e, i, h)
    index: Any  # (t, top_k)
    weights: Any  # (t, top_k)
    gate_up_bias: Any = None  # (e, w)
    down_bias: Any = None  # (e, h)

    def arguments(self) -> tuple:
        return self.x, self.gate_up, self.down, self.index, self.weights, self.gate_up_bias, self.down_bias


def layer_of(case: Case, seed: int = 0, index: Any = None) -> Layer:
    draw = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0):
        return (draw.standard_normal(shape) * scale).astype(np.float32)

    first, second = case.weight_shapes
    layer = Layer(
        x=normal(case.t, case.h),
        gate_up=normal(*first, scale=2 * max(case.h, 1) ** -0.5),
        down=normal(*second, scale=max(case.i, 1) ** -0.5),
        index=np.asarray(case.index(seed) if index is None else index, np.int32).reshape(case.t, case.top_k),
        weights=draw.random((case.t, case.top_k), np.float32),
    )
    if case.bias:
        layer.gate_up_bias, layer.down_bias = normal(case.e, case.w), normal(case.e, case.h)
    return layer


def between(case: Case, product):
    """(w,) -> (i,): the activation and the gate."""
    act = ACTIVATIONS[case.activation]
    if case.gate == "none":
        return act(product)
    half = case.w // 2
    gate, up = (product[:half], product[half:]) if case.gate == "concatenated" else (product[::2], product[1::2])
    if case.limit is not None:
        gate, up = np.minimum(gate, case.limit), np.clip(up, -case.limit, case.limit)
    return act(gate) * (up + 1 if case.activation == "swiglu_oss" else up)


def loop(case: Case, layer: Layer):
    """Each token, each of its experts, one by one, in float64."""
    x, gate_up, down, index, weights, gate_up_bias, down_bias = (
        None if part is None else np.asarray(part, np.int64 if part is layer.index else np.float64)
        for part in layer.arguments()
    )
    if case.transposed:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    out = np.zeros((case.t, case.h))
    for token in range(case.t):
        for expert, weight in zip(index[token], weights[token], strict=True):
            if 0 <= expert < case.e:
                product = gate_up[expert] @ x[token] + (0 if gate_up_bias is None else gate_up_bias[expert])
                y = down[expert] @ between(case, product) + (0 if down_bias is None else down_bias[expert])
                out[token] += weight * y
    return out


def tolerance(case: Case, eps: float, wanted: Any) -> float:
    """Two roundings to the dtype, between the products and of the result; float32 sums of h and of i terms before.

    Errors of top_k experts, and of the terms of a sum, add up like the root of their number.
    """
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    summing = 4 * np.finfo(np.float32).eps * max(case.h, case.i, 1) ** 0.5
    return case.top_k**0.5 * (2 * eps + summing) * scale
