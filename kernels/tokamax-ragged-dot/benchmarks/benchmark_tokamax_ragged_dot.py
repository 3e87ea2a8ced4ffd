"""For `kernels benchmark`: a small experts layer, checked before timed. On CPU XLA multiplies with every expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 16, 4, 256, 128


class ExpertsLayer(Benchmark):
    seed = 0

    def prepare(self, tokens: int) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self.device)

        self.gate_up = normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5
        self.down = normal(EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
        self.x = normal(tokens, HIDDEN)
        self.scores, self.index = normal(tokens, EXPERTS).softmax(-1).topk(TOP_K)

    def run_layer(self) -> None:
        self.out = self.kernel.moe_experts(self.x, self.gate_up, self.down, self.index, self.scores)

    def reference(self) -> torch.Tensor:
        out = torch.zeros_like(self.x)
        for expert in self.index.unique().tolist():
            token, slot = torch.where(self.index == expert)
            gate, up = F.linear(self.x[token], self.gate_up[expert]).chunk(2, dim=-1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[expert]) * self.scores[token, slot, None])
        return out

    def setup_tokens_8(self) -> None:
        self.prepare(8)

    def benchmark_tokens_8(self) -> None:
        self.run_layer()

    def verify_tokens_8(self) -> torch.Tensor:
        return self.reference()

    def setup_tokens_64(self) -> None:
        self.prepare(64)

    def benchmark_tokens_64(self) -> None:
        self.run_layer()

    def verify_tokens_64(self) -> torch.Tensor:
        return self.reference()
