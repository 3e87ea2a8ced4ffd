"""What the tests of router_topk share: cases, inputs, and a router spelled out token by token. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Route:
    """One call of router_topk on logits (t, e)."""

    t: int
    e: int
    top_k: int
    score: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2
    epsilon: float = 1e-20
    bias: bool = False
    dtype: str = "float32"

    @property
    def id(self) -> str:
        given = {name: value for name, value in asdict(self).items() if name not in ("score", "dtype", "bias")}
        text = "-".join(f"{name}{value}" for name, value in given.items() if value != Route.__dict__.get(name))
        return f"{text}-{self.score}{'-bias' * self.bias}-{self.dtype}"

    @property
    def options(self) -> dict[str, Any]:
        names = ("top_k", "score", "renormalize", "scale", "groups", "top_groups", "best_of_group", "epsilon")
        return {name: getattr(self, name) for name in names}


ROUTES = [
    Route(3, 1, 1),
    Route(1, 60, 4, renormalize=True),
    Route(5, 128, 8, renormalize=True, dtype="bfloat16"),
    Route(9, 130, 6, score="sigmoid", renormalize=True, scale=2.5),
    Route(2, 264, 2),
    Route(4, 7, 7, score="topk_softmax", dtype="bfloat16"),
    Route(6, 32, 4, score="topk_softmax", bias=True, dtype="float16"),
    Route(7, 20, 3, bias=True, scale=0.5),
    Route(5, 256, 8, "sigmoid", True, 2.5, groups=8, top_groups=4, bias=True),
    Route(5, 40, 6, "sigmoid", groups=8, top_groups=3, bias=True, dtype="float16"),  # groups of 5
    Route(5, 24, 5, groups=3, top_groups=2),
    Route(4, 12, 3, groups=12, top_groups=5),  # groups of one expert
    Route(4, 16, 8, groups=2, top_groups=1),  # all experts of the group
    Route(4, 16, 2, groups=4, top_groups=4),  # no limit
    Route(6, 40, 6, scale=16.0, groups=8, top_groups=3, best_of_group=1),
    Route(5, 32, 4, "sigmoid", True, bias=True, epsilon=0.5),
    Route(5, 32, 4, renormalize=True, epsilon=0.25, bias=True),
    Route(5, 32, 4, renormalize=True, epsilon=0.0),
]


def inputs_of(route: Route, seed: int = 0):
    """logits (t, e) float32 and bias (e,) or None. Quarters: exact in every dtype, and many of them equal."""
    draw = np.random.default_rng(seed)
    logits = (draw.integers(-16, 17, (route.t, route.e)) / 4).astype(np.float32)
    bias = (draw.integers(-4, 5, route.e) / 8).astype(np.float32) if route.bias else None
    return logits, bias


def loop(route: Route, logits, bias):
    """Each token by itself, in float64; of equal scores the first. -> weights (t, top_k), index (t, top_k)."""
    weights, index = np.zeros((route.t, route.top_k)), np.zeros((route.t, route.top_k), int)
    for token, x in enumerate(np.asarray(logits, np.float64)):
        power = np.exp(x - x.max())
        scores = {"softmax": power / power.sum(), "sigmoid": 1 / (1 + np.exp(-x)), "topk_softmax": x}[route.score]
        choice = scores if bias is None else scores + bias
        size = route.e // route.groups
        totals = [sum(sorted(choice[g * size : (g + 1) * size])[-route.best_of_group :]) for g in range(route.groups)]
        kept = sorted(range(route.groups), key=lambda g: -totals[g])[: route.top_groups]
        allowed = [expert for expert in range(route.e) if expert // size in kept]
        chosen = sorted(allowed, key=lambda expert: -choice[expert])[: route.top_k]
        w = scores[chosen]
        if route.score == "topk_softmax":
            w = np.exp(w - w.max()) / np.exp(w - w.max()).sum()
        elif route.renormalize:
            w = w / (w.sum() + route.epsilon)
        weights[token], index[token] = w * route.scale, chosen
    return weights, index


def tolerance(route: Route, eps: float) -> float:
    """One rounding to the dtype; an exponential, sums of e and top_k terms and two divisions in float32."""
    return (eps + 4 * np.finfo(np.float32).eps * max(4.0, route.e**0.5)) * route.scale
