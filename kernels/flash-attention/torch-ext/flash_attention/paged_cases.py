"""Named sizes of decode with pages: layers of real models, for tests and benchmarks. Needs neither torch nor jax."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class PagedCase:
    """`s` sequences of up to `context` keys, one query each: q (s, hq, d), pages (n, page, hk, d)."""

    s: int
    context: int
    hq: int
    hk: int
    d: int
    page: int
    name: str = ""

    @property
    def most_pages(self) -> int:
        return -(-self.context // self.page)

    @property
    def num_pages(self) -> int:
        return self.s * self.most_pages

    def lengths(self, seed: int = 0) -> list[int]:
        """(s,): any from 1 to context, all equally likely."""
        draw = random.Random(seed)
        return [draw.randint(1, self.context) for _ in range(self.s)]

    def page_table(self, seed: int = 0) -> list[list[int]]:
        """(s, most_pages): pages anywhere."""
        pages = list(range(self.num_pages))
        random.Random(seed).shuffle(pages)
        return [pages[n * self.most_pages : (n + 1) * self.most_pages] for n in range(self.s)]


def _of(model: str, hq: int, hk: int, d: int, page: int, s: int = 64, context: int = 4096) -> PagedCase:
    return PagedCase(s, context, hq, hk, d, page, f"{model}-s{s}-c{context}-page{page}")


MODEL_CASES = (
    *(_of("qwen3-30b-a3b", 32, 4, 128, page) for page in (16, 32, 128, 256)),
    _of("llama-3-8b", 32, 8, 128, 64),
    _of("llama-3-70b", 64, 8, 128, 64),
    _of("qwen3-30b-a3b", 32, 4, 128, 128, s=8, context=32768),
    _of("llama-2-7b", 32, 32, 128, 16),
    _of("gpt-oss-20b", 64, 8, 64, 64),
    _of("gemma-2-9b", 16, 8, 256, 64),
)
