"""The plain truth for torch tests: all scores of all rows and keys at once, in float64, masked as told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from flash_attention._bridge import use_path
from torch import Tensor

# The public functions as a user calls them; the ops on their torch path; the Pallas kernels, interpreted.
WAYS = ("plain", "torch", "interpret")


def with_ways(cases: list, interpreted: int = 1) -> list:
    """Each case on both torch paths, and the first ones interpreted too: a second or more for each new shape."""
    return [(way, case) for i, case in enumerate(cases) for way in (WAYS if i < interpreted else WAYS[:2])]


@contextlib.contextmanager
def under(way: str) -> Iterator[None]:
    if way == "plain":
        yield
        return
    with use_path(way):
        yield


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(b, lq, hq, d), (b, lk, hk, d), (b, lk, hk, dv), seen broadcastable to (b, hq, lq, lk) -> out and lse."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.double()
    s = s.masked_fill(~seen, float("-inf"))
    logits = s
    if sinks is not None:
        logits = torch.cat([s, sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def window(lq: int, lk: int, left: int = -1, right: int = -1, shift: int | None = None) -> Tensor:
    """(lq, lk) by its definition: key j is seen if it is at most `left` before and `right` after the diagonal."""
    seen = torch.zeros(lq, lk, dtype=torch.bool)
    for i in range(lq):
        diagonal = i + (lk - lq if shift is None else shift)
        for j in range(lk):
            seen[i, j] = (left < 0 or diagonal - j <= left) and (right < 0 or j - diagonal <= right)
    return seen


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def qkv(
    b: int, lq: int, lk: int, hq: int, hk: int, d: int, dv: int | None = None, dtype=torch.float32, grad=False
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(b, lq, hq, d, dtype=dtype, seed=1, grad=grad),
        random(b, lk, hk, d, dtype=dtype, seed=2, grad=grad),
        random(b, lk, hk, dv or d, dtype=dtype, seed=3, grad=grad),
    )


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype = torch.float32, terms: int = 1) -> None:
    """Two roundings to dtype, of weights and result, and sums in float32 or more whose error grows like a root."""
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    eps = max(torch.finfo(dtype).eps, torch.finfo(sums).eps * max(terms, 1) ** 0.5)
    scale = max(1.0, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got.double(), wanted.double(), rtol=0, atol=8 * eps * scale)
