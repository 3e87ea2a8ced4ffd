"""For `kernels benchmark`: the attention of Qwen3-30B-A3B (32 heads on 4, d 128), checked before it is timed."""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark

HQ, HK, D = 32, 4, 128


class _Workloads:
    seed = 0
    dtype = torch.bfloat16
    window: int | None = None

    def prepare(self, lq: int, lk: int) -> None:
        shapes = ((1, lq, HQ, D), (1, lk, HK, D), (1, lk, HK, D))
        self.q, self.k, self.v = (torch.randn(shape, device=self.device).to(self.dtype) for shape in shapes)

    def run(self) -> None:
        sides = (-1, -1) if self.window is None else (self.window - 1, 0)
        self.out = self.kernel.flash_attn_func(self.q, self.k, self.v, causal=True, window_size=sides)

    def reference(self) -> torch.Tensor:
        """Head by head in float32, the last row aligned with the last key."""
        (_, lq, _, _), lk = self.q.shape, self.k.shape[1]
        seen = torch.ones(lq, lk, dtype=torch.bool, device=self.device).tril(lk - lq)
        if self.window is not None:
            seen = seen.triu(lk - lq - self.window + 1)
        heads = []
        for head in range(HQ):
            k, v = (x[0, :, head * HK // HQ].float() for x in (self.k, self.v))
            s = (self.q[0, :, head].float() @ k.T * D**-0.5).masked_fill(~seen, float("-inf"))
            heads.append(s.softmax(-1) @ v)
        return torch.stack(heads, 1)[None].to(self.dtype)

    def setup_decode_4096(self) -> None:
        self.prepare(1, 4096)

    def benchmark_decode_4096(self) -> None:
        self.run()

    def verify_decode_4096(self) -> torch.Tensor:
        return self.reference()

    def setup_prefill_1024(self) -> None:
        self.prepare(1024, 1024)

    def benchmark_prefill_1024(self) -> None:
        self.run()

    def verify_prefill_1024(self) -> torch.Tensor:
        return self.reference()

    def setup_chunk_256_of_2048(self) -> None:
        self.prepare(256, 2048)

    def benchmark_chunk_256_of_2048(self) -> None:
        self.run()

    def verify_chunk_256_of_2048(self) -> torch.Tensor:
        return self.reference()


class Bfloat16(_Workloads, Benchmark):
    """The model's own dtype."""


class Window512(_Workloads, Benchmark):
    """Each row sees its own key and the 511 before it."""

    window = 512


class Float32(_Workloads, Benchmark):
    """The same in float32."""

    dtype = torch.float32
