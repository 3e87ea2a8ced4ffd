"""Named sizes of attention: edges that break kernels, and the attention layers of real models.

Used by tests, tuner and benchmarks; needs neither torch nor jax.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """q (b, lq, hq, d), k (b, lk, hk, d), v (b, lk, hk, dv).

    A row sees `left` keys before its own and `right` after it (None: no limit), the last row's own being the last key.
    """

    lq: int
    lk: int
    hq: int
    hk: int
    d: int
    left: int | None = None
    right: int | None = 0
    b: int = 1
    dv: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    bias: tuple[int, int, int, int] | None = None
    name: str = ""

    @property
    def value_dim(self) -> int:
        return self.d if self.dv is None else self.dv

    @property
    def id(self) -> str:
        sees = {None: "full", 0: "causal"}.get(self.right, f"right{self.right}")
        sees += "" if self.left is None else f"-left{self.left}"
        more = [
            f"softcap{self.softcap}" if self.softcap else "",
            "sinks" if self.sinks else "",
            "alibi" if self.slopes else "",
        ]
        more.append("bias" + "x".join(map(str, self.bias)) if self.bias else "")
        sizes = f"b{self.b}-q{self.lq}x{self.hq}-k{self.lk}x{self.hk}-d{self.d}" + (f"-dv{self.dv}" if self.dv else "")
        return "-".join(part for part in (self.name, sizes, sees, *more) if part)

    def interval(self, row: int) -> tuple[int, int]:
        """The keys lo <= key < hi that a row sees."""
        diagonal = row + self.lk - self.lq
        lo = 0 if self.left is None else min(max(diagonal - self.left, 0), self.lk)
        hi = self.lk if self.right is None else min(max(diagonal + self.right + 1, 0), self.lk)
        return lo, hi

    def pairs(self) -> int:
        """How many (row, key) pairs are seen, per head."""
        return self.b * sum(max(0, hi - lo) for lo, hi in map(self.interval, range(self.lq)))


# Small enough for an interpreted kernel; blocks are cut to 128 there.
EDGE_CASES = (
    Case(45, 45, 2, 1, 16),
    Case(1, 300, 4, 1, 16),  # one row, bottom right
    Case(200, 300, 4, 2, 16, b=2, dv=24),
    Case(300, 200, 2, 2, 16, sinks=True),  # 100 rows see nothing
    Case(300, 300, 1, 1, 16, left=20, right=7),
    Case(130, 260, 2, 1, 16, right=None, softcap=5.0),
    Case(130, 260, 2, 1, 16, slopes=True, bias=(1, 2, 130, 260)),
    Case(130, 260, 2, 1, 16, b=2, right=None, sinks=True, bias=(2, 1, 1, 260)),
)


@dataclass(frozen=True)
class Model:
    """Sizes of one self-attention layer."""

    name: str
    hq: int
    hk: int
    d: int

    def case(self, tokens: int) -> Case:
        return Case(tokens, tokens, self.hq, self.hk, self.d, name=f"{self.name}-{tokens}")


MODELS = (
    Model("qwen3-30b-a3b", 32, 4, 128),
    Model("llama-3.2-1b", 32, 8, 64),
    Model("phi-2", 32, 32, 80),
    Model("phi-3-mini", 32, 32, 96),
    Model("gemma-2-9b", 16, 8, 256),
)
MODEL_CASES = (*(model.case(4096) for model in MODELS), MODELS[0].case(32768))
