"""For `kernels benchmark`: the experts layer of Qwen3-30B-A3B at decode and prefill lengths, checked before timed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768


class _Workloads:
    seed = 0
    dtype = torch.bfloat16

    def prepare(self, tokens: int) -> None:
        self.gate_up = self.weights(2 * INTERMEDIATE, HIDDEN)
        self.down = self.weights(HIDDEN, INTERMEDIATE)
        self.x = torch.randn(tokens, HIDDEN, device=self.device).to(self.dtype)
        scores, self.index = torch.rand(tokens, EXPERTS, device=self.device).softmax(-1).topk(TOP_K)
        self.scores = (scores / scores.sum(-1, keepdim=True)).to(self.dtype)

    def weights(self, *shape: int) -> torch.Tensor:
        """Experts that differ, filled one by one to stay in bounds of memory."""
        weights = torch.empty(EXPERTS, *shape, dtype=self.dtype, device=self.device)
        first = torch.randn(shape, device=self.device) * shape[1] ** -0.5
        for expert in range(EXPERTS):
            weights[expert] = first.roll(expert, 0)
        return weights

    def run(self) -> None:
        self.out = self.kernel.moe_experts(self.x, self.gate_up, self.down, self.index, self.scores)

    def reference(self) -> torch.Tensor:
        out = torch.zeros(self.x.shape, device=self.device)
        for expert in self.index.unique().tolist():
            token, slot = torch.where(self.index == expert)
            gate, up = F.linear(self.x[token].float(), self.gate_up[expert].float()).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert].float())
            out.index_add_(0, token, y * self.scores[token, slot, None].float())
        return out.to(self.dtype)

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

    def setup_tokens_512(self) -> None:
        self.prepare(512)

    def benchmark_tokens_512(self) -> None:
        self.run()

    def verify_tokens_512(self) -> torch.Tensor:
        return self.reference()


class Bfloat16(_Workloads, Benchmark):
    """The model's own dtype."""


class Float32(_Workloads, Benchmark):
    """The same in float32."""

    dtype = torch.float32
