"""Attention in which every row of queries sees one interval of keys.

    attention_forward    q, k, v and the intervals -> out, log-sum-exp          forward.py
    attention_backward   the same, out, lse and their gradients -> gradients    backward.py

Causal masks, windows, sequences packed end to end, padding and caches of any length are all intervals (lo, hi), one per
row; visits.py turns them into the list of (block of rows, block of keys) pairs that a kernel has to visit.
"""

from __future__ import annotations

from .backward import attention_backward
from .forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
