"""Small ops that the bridge tests share. Each is declared once: a torch op lives as long as the process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from torch import Tensor

from pallas_hub.torch_bridge import jax_op

NAMESPACE = "pallas_hub_bridge_tests"


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x)


def _gelu_vjp(x, grad):
    return jax.vjp(jax.nn.gelu, x)[1](grad)


gelu = jax_op("gelu", namespace=NAMESPACE, fn=_gelu, vjp=_gelu_vjp)


def _linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, scale: float = 1.0) -> jax.Array:
    y = jnp.dot(x, w, preferred_element_type=jnp.float32) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def _linear_vjp(x, w, bias, grad, *, scale):
    if bias is None:
        return (*jax.vjp(lambda x, w: _linear(x, w, None, scale), x, w)[1](grad), None)
    return jax.vjp(lambda x, w, b: _linear(x, w, b, scale), x, w, bias)[1](grad)


linear = jax_op("linear", namespace=NAMESPACE, fn=_linear, vjp=_linear_vjp)


def linear_torch(x, w, bias=None, scale=1.0):
    y = x.float() @ w.float() * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(n, k) -> (2n + 1, k) with a row of ones below, and the int32 argmax of each row."""
    ones = jnp.ones((1, x.shape[1]), x.dtype)
    return jnp.concatenate([x, x, ones]), jnp.argmax(x, axis=1).astype(jnp.int32)


split = jax_op("split", namespace=NAMESPACE, fn=_split)


def _scale_pallas(x, *, factor, interpret=False):
    if not x.shape[0]:
        return x  # a grid without steps is not a Pallas program

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * factor

    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(x.shape[0], 8),),
        in_specs=[rows],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
    )(x)


def scale_pallas_vjp(x, grad, *, factor, interpret=False):
    return _scale_pallas(grad, factor=factor, interpret=interpret)


def _scale_torch(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


def _scale_reference(x, *, factor):
    return x * jnp.asarray(factor, x.dtype)


scale = jax_op("scale", namespace=NAMESPACE, fn=_scale_pallas, torch_fn=_scale_torch, shape_fn=_scale_reference)


def _scale_back(saved, needs, grad):
    return scale(grad, saved.factor) if needs.x else None


scale.set_backward(_scale_back, save=())


def _matmul_torch(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def _matmul_back(saved, needs, grad):
    return (
        matmul(grad, saved.w.t()) if needs.x else None,
        matmul(saved.x.t(), grad) if needs.w else None,
    )


matmul = jax_op("matmul", namespace=NAMESPACE, fn=lambda x, w: x @ w, torch_fn=_matmul_torch)
matmul.set_backward(_matmul_back, save=lambda needs: ("w",) * needs.x + ("x",) * needs.w)


def _flat_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y.reshape(-1)


flat_sum = jax_op("flat_sum", namespace=NAMESPACE, fn=_flat_sum)


def awkward_inputs() -> dict[str, Tensor]:
    """(n, 4) tensors as users have them."""
    torch.manual_seed(0)
    return {
        "contiguous": torch.randn(6, 4),
        "transposed": torch.randn(4, 6).t(),
        "expanded": torch.randn(1, 4).expand(5, 4),
        "sliced": torch.randn(9, 8)[1::2, 2:6],
        "empty": torch.randn(0, 4),
        "one-row": torch.randn(3, 4)[:1],
        "bfloat16": torch.randn(6, 4, dtype=torch.bfloat16),
        "requires_grad": torch.randn(6, 4, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(6, 4)),
    }
