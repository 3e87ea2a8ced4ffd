"""For `kernels benchmark`: the experts of Qwen3-30B-A3B at decode and prefill lengths, and those of gpt-oss-20b."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class _Workloads:
    seed = 0
    dtype = torch.bfloat16
    experts, top_k, hidden, intermediate = 128, 8, 2048, 768

    def prepare(self, tokens: int) -> None:
        self.names: dict = {}
        self.gate_up = self.weights(2 * self.intermediate, self.hidden)
        self.down = self.weights(self.hidden, self.intermediate)
        self.x = torch.randn(tokens, self.hidden, device=self.device).to(self.dtype)
        scores, self.index = torch.rand(tokens, self.experts, device=self.device).softmax(-1).topk(self.top_k)
        self.scores = (scores / scores.sum(-1, keepdim=True)).to(self.dtype)

    def weights(self, *shape: int) -> torch.Tensor:
        """Experts that differ, filled one by one to stay in bounds of memory."""
        weights = torch.empty(self.experts, *shape, dtype=self.dtype, device=self.device)
        first = torch.randn(shape, device=self.device) * shape[1] ** -0.5
        for expert in range(self.experts):
            weights[expert] = first.roll(expert, 0)
        return weights

    def run(self) -> None:
        self.out = self.kernel.moe_experts(self.x, self.gate_up, self.down, self.index, self.scores, **self.names)

    def reference(self) -> torch.Tensor:
        out = torch.zeros(self.x.shape, device=self.device)
        for expert in self.index.unique().tolist():
            token, slot = torch.where(self.index == expert)
            y = self.one_expert(self.x[token].float(), expert)
            out.index_add_(0, token, y * self.scores[token, slot, None].float())
        return out.to(self.dtype)

    def one_expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up[expert].float()).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[expert].float())

    def setup_tokens_1(self) -> None:
        self.prepare(1)

    def benchmark_tokens_1(self) -> None:
        self.run()

    def verify_tokens_1(self) -> torch.Tensor:
        return self.reference()

    def setup_tokens_64(self) -> None:
        self.prepare(64)

    def benchmark_tokens_64(self) -> None:
        self.run()

    def verify_tokens_64(self) -> torch.Tensor:
        return self.reference()


class _Longer(_Workloads):
    def setup_tokens_8(self) -> None:
        self.prepare(8)

    def benchmark_tokens_8(self) -> None:
        self.run()

    def verify_tokens_8(self) -> torch.Tensor:
        return self.reference()

    def setup_tokens_512(self) -> None:
        self.prepare(512)

    def benchmark_tokens_512(self) -> None:
        self.run()

    def verify_tokens_512(self) -> torch.Tensor:
        return self.reference()


class Bfloat16(_Longer, Benchmark):
    """The model's own dtype."""


class Float32(_Longer, Benchmark):
    """The same in float32."""

    dtype = torch.float32


class GptOss(_Workloads, Benchmark):
    """Interleaved gate and up, transposed weights, biases, a limit: the layout of gpt-oss-20b."""

    experts, top_k, hidden, intermediate = 32, 4, 2880, 2880

    def prepare(self, tokens: int) -> None:
        super().prepare(tokens)
        self.gate_up, self.down = (weights.mT.contiguous() for weights in (self.gate_up, self.down))
        self.down *= 0.1  # results below 1: they are compared by an absolute difference
        biases = [torch.randn(self.experts, size, device=self.device) for size in (2 * self.intermediate, self.hidden)]
        self.names = {
            "activation": "swiglu_oss",
            "gate": "interleaved",
            "limit": 7.0,
            "transposed": True,
            "gate_up_bias": (0.1 * biases[0]).to(self.dtype),
            "down_bias": (0.1 * biases[1]).to(self.dtype),
        }

    def one_expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        y = x @ self.gate_up[expert].float() + self.names["gate_up_bias"][expert].float()
        gate, up = y[:, ::2].clamp(max=7.0), y[:, 1::2].clamp(-7.0, 7.0)
        y = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return y @ self.down[expert].float() + self.names["down_bias"][expert].float()
