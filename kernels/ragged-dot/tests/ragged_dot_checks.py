"""What the torch tests of ragged-dot share: a loop over groups as the plain truth, and MoE layers spelled out."""

from __future__ import annotations

import torch
from torch import Tensor


def loop_over_groups(lhs: Tensor, rhs: Tensor, sizes: list[int], transpose_rhs: bool = False) -> Tensor:
    """ragged_dot, one group after the other, in float64."""
    lhs, rhs = lhs.double(), rhs.double()
    out = lhs.new_zeros(lhs.shape[0], rhs.shape[1 if transpose_rhs else 2])
    start = 0
    for weight, size in zip(rhs, sizes, strict=True):
        out[start : start + size] = lhs[start : start + size] @ (weight.T if transpose_rhs else weight)
        start += size
    return out


def loop_over_tokens(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, scores: Tensor) -> Tensor:
    """An experts layer with silu and concatenated gate and up: each token, each of its experts, one by one."""
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros_like(x[token])
        for slot in range(index.shape[1]):
            expert = int(index[token, slot])
            if expert < gate_up.shape[0]:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                row = row + scores[token, slot] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """Each result is one rounding to dtype of a sum whose error grows like the root of its number of terms."""
    eps = torch.finfo(dtype).eps
    return 4 * max(eps, torch.finfo(torch.float32).eps * max(terms, 1) ** 0.5)


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype, terms: int) -> None:
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got.double(), wanted.double(), rtol=0, atol=tolerance(dtype, terms) * scale)
