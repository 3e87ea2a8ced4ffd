"""Cutting a program at its kernels: each operation lands in one piece, and pieces compute what the program does."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
import aot_kernels as toy  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pallas_hub.bench.aot.surroundings import split_at_kernels  # noqa: E402

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def names(piece):
    return {eqn.primitive.name for eqn in jax.make_jaxpr(piece.fn)(*piece.args).eqns}


def test_before_and_after_a_kernel():
    before, after = split_at_kernels(lambda x: toy.add_one(x, pad=True), [X])
    assert names(before) == {"sin"}
    assert names(after) == {"cos"}
    x = np.linspace(0, 1, 64 * 128, dtype=np.float32).reshape(64, 128)
    np.testing.assert_array_equal(before.fn(x)[0], np.asarray(jnp.sin(x)))


def test_a_kernel_alone_has_nothing_around_it():
    assert split_at_kernels(toy.add_one, [X]) == []
    assert split_at_kernels(lambda x: toy.add_one(x.reshape(64, 128)), [X]) == []


def test_operations_inside_jit_are_found():
    inner = jax.jit(lambda x: jnp.exp(toy.add_one(jnp.tanh(x))))
    before, after = split_at_kernels(lambda x: inner(x) * 2.0, [X])
    assert names(before) == {"tanh"}
    assert names(after) == {"exp", "mul"}


def test_a_value_used_on_both_sides_is_computed_once():
    def program(x):
        s = jnp.sin(x)
        return toy.add_one(s) + s

    before, after = split_at_kernels(program, [X])
    assert names(before) == {"sin"}
    assert names(after) == {"add"}
    assert len(after.args) == 2


def test_a_program_without_kernels_is_one_piece():
    (piece,) = split_at_kernels(lambda x: (jnp.sin(x), jnp.sum(x)), [X])
    assert names(piece) == {"sin", "reduce_sum"}
    x = np.ones((64, 128), np.float32)
    results = piece.fn(x)
    assert float(results[1]) == 64 * 128


def test_two_kernels_make_three_pieces():
    pieces = split_at_kernels(lambda x: jnp.cos(toy.add_one(jnp.exp(toy.add_one(jnp.sin(x))))), [X])
    assert [names(piece) for piece in pieces] == [{"sin"}, {"exp"}, {"cos"}]
