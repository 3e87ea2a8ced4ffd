"""Tokamax's ragged dot for any sizes and both layouts of the weights, with its gradients.

    ragged_dot              (m, k) @ (g, k, n) -> (m, n)
    ragged_dot_transposed   (m, k) @ (g, n, k) -> (m, n)

What Tokamax leaves to its caller is done here. Its TPU kernel ("mosaic") takes no fewer than 128 rows, and does not
write rows that belong to no group; its own gradient for transposed weights has their axes the wrong way round (0.0.12).
Weights narrower than 128 on either side its TPU kernel refuses; then XLA multiplies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LEAST_ROWS = 128


def ragged_dot(tokamax, lhs, rhs, group_sizes, *, implementation):
    return _product(tokamax, lhs, rhs, group_sizes, False, implementation)


def ragged_dot_vjp(tokamax, lhs, rhs, group_sizes, grad, *, implementation):
    to_lhs = _product(tokamax, grad, rhs, group_sizes, True, implementation).astype(lhs.dtype)
    return to_lhs, _weight_gradient(tokamax, lhs, grad, group_sizes, rhs.dtype, implementation), None


def ragged_dot_transposed(tokamax, lhs, rhs, group_sizes, *, implementation):
    return _product(tokamax, lhs, rhs, group_sizes, True, implementation)


def ragged_dot_transposed_vjp(tokamax, lhs, rhs, group_sizes, grad, *, implementation):
    to_lhs = _product(tokamax, grad, rhs, group_sizes, False, implementation).astype(lhs.dtype)
    return to_lhs, _weight_gradient(tokamax, grad, lhs, group_sizes, rhs.dtype, implementation), None


def _product(tokamax, lhs, rhs, group_sizes, transposed, implementation):
    m, n = lhs.shape[0], rhs.shape[1 if transposed else 2]
    if _is_empty(lhs, rhs):
        return jnp.zeros((m, n), lhs.dtype)
    product = tokamax.ragged_dot_general(
        _enough_rows(lhs, implementation),
        rhs,
        group_sizes=group_sizes,
        ragged_dot_dimension_numbers=_dimensions(1, 2 if transposed else 1, group=[0]),
        preferred_element_type=lhs.dtype,
        implementation=implementation,
    )
    return _in_groups(product[:m], group_sizes)


def _weight_gradient(tokamax, left, right, group_sizes, dtype, implementation):
    """(m, k), (m, n) -> (g, k, n): rows of both against each other, per group."""
    g, k, n = group_sizes.shape[0], left.shape[1], right.shape[1]
    if _is_empty(left, right) or g == 0:
        return jnp.zeros((g, k, n), dtype)
    if implementation == "xla":  # which would multiply rows of no group by zero: NaN stays NaN
        left, right = _in_groups(left, group_sizes), _in_groups(right, group_sizes)
    return tokamax.ragged_dot_general(
        _enough_rows(left, implementation),
        _enough_rows(right, implementation),
        group_sizes=group_sizes,
        ragged_dot_dimension_numbers=_dimensions(0, 0, group=[]),
        preferred_element_type=dtype,
        implementation=implementation,
    )


def _dimensions(lhs, rhs, group):
    return jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([lhs], [rhs]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=group,
    )


def _enough_rows(rows, implementation):
    if implementation == "xla":
        return rows
    return jnp.pad(rows, ((0, max(LEAST_ROWS - rows.shape[0], 0)), (0, 0)))


def _in_groups(rows, group_sizes):
    """`rows` with zeros where no group has them."""
    in_a_group = jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes)
    return jnp.where(in_a_group[:, None], rows, 0)


def _is_empty(*arrays):
    return any(0 in array.shape for array in arrays)
