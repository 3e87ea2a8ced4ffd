"""Sequences in pages for the tests: what a kernel may not look at is NaN, and page numbers past the end are wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pages:
    q: np.ndarray  # (total_q, hq, d)
    k: np.ndarray  # (num_pages, page, hk, d)
    v: np.ndarray  # (num_pages, page, hk, dv)
    lengths: np.ndarray  # (s,)
    table: np.ndarray  # (s, most_pages)
    q_starts: np.ndarray  # (s + 1,)


def in_pages(
    lengths, q_sizes, *, hq: int, hk: int, d: int = 128, dv: int | None = None, page: int = 8, most_pages: int = 4,
    total_q: int | None = None, seed: int = 0,
) -> Pages:  # fmt: skip
    """Random sequences of these lengths, each with its last q_sizes tokens as queries."""
    draw, s, dv = np.random.default_rng(seed), len(lengths), dv or d
    num_pages = s * most_pages + 1
    table = draw.permutation(num_pages)[: s * most_pages].reshape(s, most_pages).astype(np.int32)
    k, v = (draw.standard_normal((num_pages, page, hk, size)) for size in (d, dv))
    used = np.zeros((num_pages, page), bool)
    for row, length in zip(table, lengths, strict=True):
        for token in range(length):
            used[row[token // page], token % page] = True
        row[-(-length // page) :] = -7
    k[~used] = v[~used] = np.nan
    q_starts = np.concatenate([[0], np.cumsum(q_sizes)]).astype(np.int32)
    q = draw.standard_normal((int(q_starts[-1]) if total_q is None else total_q, hq, d))
    return Pages(q, k, v, np.array(lengths, np.int32), table, q_starts)
