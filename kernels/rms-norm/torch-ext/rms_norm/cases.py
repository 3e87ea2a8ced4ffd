"""Named shapes: awkward sizes for tests, layers of real models for tuner and benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call of rms_norm on x (m, n)."""

    name: str
    m: int
    n: int
    dtype: str = "bfloat16"
    zero_centered: bool = False
    float32_scale: bool = False
    residual: bool = False


EDGE_CASES = (
    Case("one-element", 1, 1),
    Case("one-row", 1, 129, "float32"),
    Case("odd", 13, 100, "float32"),
    Case("unaligned", 37, 1000, zero_centered=True),
    Case("partial-block", 44, 640, residual=True),
    Case("wide", 40, 65536),
    Case("cut-rows", 9, 262144),
)

MODEL_CASES = tuple(
    Case(
        f"{model}-{tokens}{'-residual' if residual else ''}", tokens, n, zero_centered=zero_centered, residual=residual
    )
    for model, n, zero_centered in (
        ("qwen3-30b-a3b", 2048, False),
        ("llama-3-8b", 4096, False),
        ("gemma-3-27b", 5376, True),
    )
    for tokens in (1, 8, 64, 4096)
    for residual in (False, True)
)

CASES = EDGE_CASES + MODEL_CASES
