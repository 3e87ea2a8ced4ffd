"""For `kernels benchmark`: layer widths of real models at decode and prefill lengths, checked before timed."""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark

EPS = 1e-6


class _Workloads:
    seed = 0
    n = 2048
    dtype = torch.bfloat16

    def prepare(self, tokens: int) -> None:
        self.x = torch.randn(tokens, self.n, dtype=self.dtype, device=self.device)
        self.residual = torch.randn_like(self.x)
        self.weight = torch.randn(self.n, dtype=self.dtype, device=self.device)

    def run(self) -> None:
        self.out = self.kernel.rms_norm(self.x, self.weight, EPS)

    def reference(self, x: torch.Tensor | None = None) -> torch.Tensor:
        wide = (self.x if x is None else x).to(torch.float32)
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * unit.to(self.dtype)

    def setup_tokens_1(self) -> None:
        self.prepare(1)

    def benchmark_tokens_1(self) -> None:
        self.run()

    def verify_tokens_1(self) -> torch.Tensor:
        return self.reference()

    def setup_tokens_8(self) -> None:
        self.prepare(8)

    def benchmark_tokens_8(self) -> None:
        self.run()

    def verify_tokens_8(self) -> torch.Tensor:
        return self.reference()

    def setup_tokens_64(self) -> None:
        self.prepare(64)

    def benchmark_tokens_64(self) -> None:
        self.run()

    def verify_tokens_64(self) -> torch.Tensor:
        return self.reference()

    def setup_tokens_4096(self) -> None:
        self.prepare(4096)

    def benchmark_tokens_4096(self) -> None:
        self.run()

    def verify_tokens_4096(self) -> torch.Tensor:
        return self.reference()

    def setup_residual_64(self) -> None:
        self.prepare(64)

    def benchmark_residual_64(self) -> None:
        self.out, self.total = self.kernel.rms_norm(self.x, self.weight, EPS, residual=self.residual)

    def verify_residual_64(self) -> torch.Tensor:
        return self.reference(self.x + self.residual)


class Bfloat16(_Workloads, Benchmark):
    """Qwen3-30B-A3B width."""


class Float32(_Workloads, Benchmark):
    """The same in float32."""

    dtype = torch.float32
