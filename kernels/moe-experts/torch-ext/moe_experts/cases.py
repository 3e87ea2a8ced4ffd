"""Named sizes of an experts layer: edges that break kernels, and the layers of real models.

Used by tests, tuner and benchmarks; needs neither torch nor jax.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .stored import FORMATS, Stored


@dataclass(frozen=True)
class Case:
    """`t` tokens to `top_k` of `e` experts each: x (t, h), gate_up (e, w, h), down (e, h, i)."""

    t: int
    h: int
    i: int
    e: int
    top_k: int
    routed: int = 0  # experts of the whole layer, when this rank holds only the first `e` of them
    activation: str = "silu"
    gate: str = "concatenated"
    limit: float | None = None
    bias: bool = False
    transposed: bool = False
    quantized: str = ""  # a name of stored.FORMATS, for transposed weights
    name: str = ""

    @property
    def w(self) -> int:
        return self.i if self.gate == "none" else 2 * self.i

    @property
    def weight_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        if self.transposed:
            return (self.e, self.h, self.w), (self.e, self.i, self.h)
        return (self.e, self.w, self.h), (self.e, self.h, self.i)

    @property
    def id(self) -> str:
        sizes = f"t{self.t}-h{self.h}-i{self.i}-e{self.e}-top{self.top_k}"
        what = [self.activation * (self.activation != "silu"), self.gate * (self.gate != "concatenated")]
        what += ["limit" * (self.limit is not None), "bias" * self.bias, "transposed" * self.transposed, self.quantized]
        return "-".join(part for part in (self.name, sizes, *what) if part)

    @property
    def stored(self) -> tuple[Stored, ...]:
        """How gate_up and down are stored, if quantised."""
        return (FORMATS[self.quantized],) * 2 if self.quantized else ()

    def index(self, seed: int = 0) -> list[list[int]]:
        """(t, top_k): a router that finds all experts equally likely; `e` where the expert is another rank's."""
        draw, experts = random.Random(seed), self.routed or self.e
        return [[min(expert, self.e) for expert in draw.sample(range(experts), self.top_k)] for _ in range(self.t)]


# Small enough for an interpreted kernel.
EDGE_CASES = (
    Case(1, 1, 1, 1, 1),
    Case(3, 7, 5, 4, 2, bias=True),  # nothing is aligned
    Case(17, 256, 128, 6, 3),  # two blocks of h, one row past a register
    Case(5, 384, 130, 3, 2, gate="interleaved", transposed=True, bias=True, activation="swiglu_oss", limit=7.0),
    Case(4, 128, 256, 5, 5, gate="none", activation="relu2"),  # every token to every expert
    Case(9, 256, 72, 4, 2, routed=16, transposed=True),  # most slots are served elsewhere
    Case(2, 32, 16, 300, 4),  # far more experts than slots
    Case(6, 130, 300, 2, 1, activation="gelu_tanh", gate="interleaved"),  # pairs in two chunks, the second not full
)


@dataclass(frozen=True)
class Model:
    """Sizes and layout of a model's experts."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str = "silu"
    gate: str = "concatenated"
    limit: float | None = None
    bias: bool = False
    transposed: bool = False

    def case(self, tokens: int, experts_here: int | None = None, quantized: str = "") -> Case:
        """The layer with this many tokens; with `experts_here`, one rank's share of it, holding that many experts."""
        whole = Case(
            tokens,
            self.hidden,
            self.intermediate,
            self.experts,
            self.top_k,
            activation=self.activation,
            gate=self.gate,
            limit=self.limit,
            bias=self.bias,
            transposed=self.transposed or bool(quantized),
            quantized=quantized,
            name=f"{self.name}-{quantized}-t{tokens}" if quantized else f"{self.name}-t{tokens}",
        )
        if experts_here is None:
            return whole
        name = f"{self.name}-{experts_here}of{self.experts}-t{tokens}"
        return replace(whole, e=experts_here, routed=self.experts, name=name)


QWEN = Model("qwen3-30b-a3b", hidden=2048, intermediate=768, experts=128, top_k=8)
GEMMA = Model("gemma4-26b-a4b", hidden=2816, intermediate=704, experts=128, top_k=8, activation="gelu_tanh")
GPT_OSS = Model(
    "gpt-oss-20b",
    hidden=2880,
    intermediate=2880,
    experts=32,
    top_k=4,
    activation="swiglu_oss",
    gate="interleaved",
    limit=7.0,
    bias=True,
    transposed=True,
)
MODELS = (
    QWEN,
    GEMMA,
    GPT_OSS,
    Model("mixtral-8x7b", hidden=4096, intermediate=14336, experts=8, top_k=2),
)
DECODE_TOKENS = (1, 8, 64)
PREFILL_TOKENS = (4096,)
MODEL_CASES = (
    *(model.case(tokens) for model in MODELS for tokens in DECODE_TOKENS + PREFILL_TOKENS),
    *(QWEN.case(tokens, experts_here=16) for tokens in DECODE_TOKENS + PREFILL_TOKENS),
)
QUANTIZED_CASES = tuple(
    model.case(tokens, quantized=name)
    for model in (QWEN, GEMMA)
    for name in ("int8", "fp8", "fp8-block", "int4")
    for tokens in DECODE_TOKENS
)
