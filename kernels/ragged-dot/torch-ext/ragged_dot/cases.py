"""Named sizes of a ragged dot: edges that break kernels, and the expert layers of real models.

Used by tests, tuner and benchmarks; needs neither torch nor jax.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`m` rows in `g` groups of the given sizes: (m, k) @ (g, k, n) -> (m, n)."""

    m: int
    k: int
    n: int
    group_sizes: tuple[int, ...]
    name: str = ""

    @property
    def g(self) -> int:
        return len(self.group_sizes)

    @property
    def id(self) -> str:
        sizes = "-".join(map(str, self.group_sizes)) if self.g <= 8 else f"g{self.g}"
        return "-".join(filter(None, [self.name, f"m{self.m}", f"k{self.k}", f"n{self.n}", sizes]))


# Small enough for an interpreted kernel; tiles are cut smaller than these in the tests.
EDGE_CASES = (
    Case(6, 2, 2, (2, 0, 1)),  # rows past the last group
    Case(10, 16, 24, (3, 0, 6, 1)),
    Case(16, 64, 32, (8, 0, 8, 0)),  # last group empty
    Case(16, 64, 32, (0, 0, 16, 0)),  # one group takes all, first and last empty
    Case(16, 64, 32, (0, 0, 0, 0)),  # all empty
    Case(45, 200, 136, (0, 13, 0, 20, 5, 0)),  # boundaries inside tiles, rows left over
    Case(45, 16, 8, (32, 13)),  # last tile is partial
    Case(6, 7, 5, (1, 2, 3)),  # nothing is aligned
    Case(9, 1025, 130, (4, 5)),  # one past a multiple of the lane count
    Case(5, 8, 8, (5,)),  # a single group
    Case(1, 1, 1, (1,)),
    Case(1, 16, 16, (0, 0, 1)),
    Case(8, 16, 8, tuple(1 if e % 16 == 3 else 0 for e in range(128))),  # few rows, many groups
    Case(0, 4, 3, (0, 0)),
    Case(4, 0, 3, (1, 2)),
    Case(4, 3, 0, (1, 2)),
    Case(4, 3, 2, ()),
)


def routed_sizes(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[int, ...]:
    """Group sizes of a router that sends each token to `top_k` different experts, all equally likely."""
    draw = random.Random(seed)
    sizes = [0] * experts
    for _ in range(tokens):
        for expert in draw.sample(range(experts), top_k):
            sizes[expert] += 1
    return tuple(sizes)


@dataclass(frozen=True)
class Model:
    """Sizes of one experts layer: hidden -> 2 * intermediate (gate and up), then intermediate -> hidden."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def cases(self, tokens: int) -> tuple[Case, Case]:
        sizes = routed_sizes(tokens, self.experts, self.top_k)
        m = tokens * self.top_k
        return (
            Case(m, self.hidden, 2 * self.intermediate, sizes, f"{self.name}-gate-up-t{tokens}"),
            Case(m, self.intermediate, self.hidden, sizes, f"{self.name}-down-t{tokens}"),
        )


MODELS = (
    Model("qwen3-30b-a3b", hidden=2048, intermediate=768, experts=128, top_k=8),
    Model("gemma4-26b-a4b", hidden=2816, intermediate=704, experts=128, top_k=8),
    Model("mixtral-8x7b", hidden=4096, intermediate=14336, experts=8, top_k=2),
)
DECODE_TOKENS = (1, 8, 64)
PREFILL_TOKENS = (4096,)
MODEL_CASES = tuple(
    case for model in MODELS for tokens in DECODE_TOKENS + PREFILL_TOKENS for case in model.cases(tokens)
)
