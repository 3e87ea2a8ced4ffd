"""Between the two products: the activation, and how gate and up lie in the first one.

    gated = activation(gate) * up          with a limit: gate cut at `limit` and up to -limit ... limit before that
    gated = activation(x)                  without a gate

"swiglu_oss" is gpt-oss' own, (up + 1) * gate * sigmoid(1.702 * gate), and needs a gate. All in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .config import LANES

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "swiglu_oss": lambda x: x * jax.nn.sigmoid(x * 1.702),  # and 1 is added to up
}
CHUNK = 256


class Gating(NamedTuple):
    activation: str
    gate: str  # "concatenated", "interleaved" or "none"
    limit: float | None = None

    def chunk(self, w: int, wanted: int = CHUNK) -> int:
        """How many columns of the result are made at once; all of them where up can't be cut off at whole lanes."""
        if self.gate == "interleaved":
            return CHUNK
        return wanted if self.gate == "none" or w // 2 % LANES == 0 else w // 2

    def of(self, product):
        """(rows, w) -> (rows, i), float32; w is 2 * i, or i without a gate."""
        if self.gate == "none":
            return ACTIVATIONS[self.activation](product)
        if self.gate == "interleaved":
            return self.join(product[:, ::2], product[:, 1::2])
        i = product.shape[1] // 2
        return self.join(product[:, :i], product[:, i:])

    def columns_of(self, read: Callable, start, size: int, w: int):
        """The same inside a kernel: columns start ... start + size, `read(columns)` giving columns of the product."""
        if self.gate == "none":
            return ACTIVATIONS[self.activation](read(pl.ds(start, size)))
        if self.gate == "interleaved":
            start = 2 * start if isinstance(start, int) else pl.multiple_of(2 * start, 2 * CHUNK)
            return self.join(*_alternate(read(pl.ds(start, 2 * size))))
        return self.join(read(pl.ds(start, size)), read(pl.ds(w // 2 + start, size)))

    def join(self, gates, ups):
        if self.limit is not None:
            gates, ups = jnp.minimum(gates, self.limit), jnp.clip(ups, -self.limit, self.limit)
        return ACTIVATIONS[self.activation](gates) * (ups + 1.0 if self.activation == "swiglu_oss" else ups)


def _alternate(product):
    """product[:, ::2], product[:, 1::2] by an exact product with zeros and ones: lanes can't be read with a stride.

    Both matrices grow with the square of the columns, so only a chunk of them may come at a time.
    """
    i = product.shape[1] // 2
    row = jax.lax.broadcasted_iota(jnp.int32, (2 * i, i), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (2 * i, i), 1)

    def pick(first):
        chosen = (row == 2 * column + first).astype(jnp.float32)
        return jnp.dot(product, chosen, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    return pick(0), pick(1)
