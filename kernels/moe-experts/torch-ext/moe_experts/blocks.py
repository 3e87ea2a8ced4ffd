"""What both kernels do with blocks in VMEM."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def for_chunks(size: int, chunk: int, step) -> None:
    """step(start, length) over an axis. A loop, since a long run of products leaves the compiler short of registers."""
    whole = size // chunk

    def body(n, carry):
        step(pl.multiple_of(n * chunk, chunk), chunk)
        return carry

    if whole:
        jax.lax.fori_loop(0, whole, body, 0)
    if size % chunk:
        step(whole * chunk, size % chunk)


def dot(x, weight, transposed: bool):
    """(rows, in), (out, in) or (in, out) -> (rows, out) in float32; float32 is not rounded to bfloat16."""
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (0 if transposed else 1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
