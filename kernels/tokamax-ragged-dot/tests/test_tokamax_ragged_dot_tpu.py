"""Tokamax's kernel as this repo calls it: interpreted against the formula, and compiled for TPUs by libtpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("tokamax")
pytest.importorskip("libtpu")
import jax
import jax.numpy as jnp
import numpy as np
from tokamax_ragged_dot import _tokamax, kernel

from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu


def interpreted():
    """A Tokamax whose "mosaic" is its Pallas kernel in the interpreter. It asks the default device what TPU it is."""
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import PallasMosaicTpuRaggedDot

    _tokamax.load_tokamax("ragged_dot", "tokamax-ragged-dot")
    run = PallasMosaicTpuRaggedDot(interpret=True)

    def ragged_dot_general(lhs, rhs, *, implementation, **options):
        assert implementation == "mosaic"
        return run(lhs, rhs, **options)

    return SimpleNamespace(ragged_dot_general=ragged_dot_general)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_interpreted_kernel_takes_few_rows_and_clears_rows_of_no_group(transposed):
    random = np.random.default_rng(0)
    sizes = np.array([3, 0, 6, 1], np.int32)
    lhs = random.standard_normal((12, 128)).astype(np.float32)
    rhs = random.standard_normal((4, 128, 256)).astype(np.float32)
    grad = random.standard_normal((12, 256)).astype(np.float32)
    given = rhs.swapaxes(1, 2).copy() if transposed else rhs
    name = "ragged_dot_transposed" if transposed else "ragged_dot"

    @jax.jit
    def run(lhs, rhs, sizes, grad):
        with jax.default_device(_tokamax.TpuDevice("TPU v6 lite")):
            out = getattr(kernel, name)(interpreted(), lhs, rhs, sizes, implementation="mosaic")
            back = getattr(kernel, f"{name}_vjp")(interpreted(), lhs, rhs, sizes, grad, implementation="mosaic")
        return out, *back[:2]

    out, to_lhs, to_rhs = map(np.asarray, run(lhs, given, sizes, grad))
    group = np.repeat(np.arange(4), sizes)
    rows = range(len(group))
    wanted = np.zeros((12, 256))
    wanted[: len(group)] = [lhs[i].astype(float) @ rhs[group[i]] for i in rows]
    wanted_lhs = np.zeros((12, 128))
    wanted_lhs[: len(group)] = [rhs[group[i]].astype(float) @ grad[i] for i in rows]
    wanted_rhs = np.zeros(rhs.shape)
    for i in rows:
        wanted_rhs[group[i]] += np.outer(lhs[i], grad[i])
    # float32 sums of at most 256 terms
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(out, wanted, **close)
    np.testing.assert_allclose(to_lhs, wanted_lhs, **close)
    np.testing.assert_allclose(to_rhs, wanted_rhs.swapaxes(1, 2) if transposed else wanted_rhs, **close)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_tpu(target):
    call = _tokamax.TokamaxCall(
        "ragged_dot_transposed", "tokamax-ragged-dot", kernel.__name__, None, "tpu", ("mosaic",), 3
    )
    x, w = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4, 384, 256), jnp.bfloat16)
    sizes, grad = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((8, 384), jnp.bfloat16)
    compile_for_tpu(lambda *a: (call(*a[:3]), call.vjp(*a)[:2]), x, w, sizes, grad, target=target)
