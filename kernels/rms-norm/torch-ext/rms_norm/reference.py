"""What rms_norm means, in plain jax.numpy: the definition the kernels are checked against."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x, weight, *, eps: float = 1e-6, zero_centered: bool = False, float32_scale: bool = False):
    """y = x / rms(x) * weight over the last axis; x (..., n), weight (n,) -> (..., n), float32 inside.

    The Llama order rounds x / rms(x) to x.dtype and then multiplies by weight. With `float32_scale` the product is
    taken in float32 and rounded once; `zero_centered` (Gemma) does that with 1 + weight.
    """
    unit = _unit_rms(x, eps)
    if zero_centered or float32_scale:
        scale = weight.astype(jnp.float32) + (1.0 if zero_centered else 0.0)
        return (unit * scale).astype(x.dtype)
    out_dtype = jnp.promote_types(x.dtype, weight.dtype)
    return unit.astype(x.dtype).astype(out_dtype) * weight.astype(out_dtype)


def rms_norm_residual(x, residual, weight, **options):
    """(rms_norm(x + residual), x + residual): the sum is rounded to x.dtype before it is normalised."""
    total = x + residual
    return rms_norm(total, weight, **options), total


def rms_norm_backward(x, weight, dy, **options):
    """Gradients of x and weight for the gradient dy of y."""
    return jax.vjp(lambda x, weight: rms_norm(x, weight, **options), x, weight)[1](dy)


def rms_norm_residual_backward(total, weight, dy, dtotal, **options):
    """Gradients of x (which is that of residual) and weight; total is x + residual."""
    dx, dweight = rms_norm_backward(total, weight, dy, **options)
    return dx + dtotal, dweight


def _unit_rms(x, eps):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
