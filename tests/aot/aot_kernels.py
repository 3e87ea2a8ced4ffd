"""Small Pallas kernels with known traffic and known trouble, for the tests of the compile reports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def _add_one(x_ref, y_ref):
    y_ref[...] = x_ref[...] + 1.0


def add_one(x, *, rows=64, pad=False):
    """Each block of rows goes in once and out once; with `pad`, XLA multiplies before the kernel and after it."""
    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    if pad:
        x = jnp.sin(x)
    y = pl.pallas_call(
        _add_one,
        grid=(pl.cdiv(x.shape[0], rows),),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="add_one",
    )(x)
    return jnp.cos(y) if pad else y


def matmul(x, w):
    """One row of blocks per step; the whole of w stays in VMEM and is copied once."""
    m, k = x.shape
    n = w.shape[1]

    def body(x_ref, w_ref, y_ref):
        y_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        body,
        grid=(m // 128,),
        in_specs=[pl.BlockSpec((128, k), lambda i: (i, 0)), pl.BlockSpec((k, n), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((128, n), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        name="toy_matmul",
    )(x, w)


def gather_blocks(table, count, x):
    """Step i copies in block table[i] of x; `count` steps are known only at run time."""

    def body(_table, x_ref, y_ref):
        y_ref[...] = x_ref[...]

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[pl.BlockSpec((8, 128), lambda i, table: (table[i], 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, table: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((table.shape[0] * 8, 128), x.dtype),
        name="gather_blocks",
    )(table, x)


def too_large(x):
    """64 MiB of scratch memory, all of it used."""

    def body(x_ref, y_ref, scratch_ref):
        def fill(i, _):
            scratch_ref[pl.ds(i * 8, 8), :] = jnp.broadcast_to(x_ref[0, 0] + i, (8, 1024)).astype(jnp.float32)

        def add(i, _):
            y_ref[...] += scratch_ref[pl.ds(i * 8, 8), :128]

        jax.lax.fori_loop(0, 2048, fill, None)
        jax.lax.fori_loop(0, 2048, add, None)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((16384, 1024), jnp.float32)],
        name="too_large",
    )(x)


def copies_by_itself(x):
    """The operand stays in HBM, and the kernel would start its copies: what it moves can't be seen from outside."""

    def body(x_ref, y_ref):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 8)], y_ref)

    return pl.pallas_call(
        body,
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=pl.BlockSpec((8, 128), lambda: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
        name="copies_by_itself",
    )(x)


def kills_the_process(x):
    """Stands for a compiler that aborts: this process is gone while it traces."""
    import os

    os.abort()
    return x


def never_returns(x):
    import time

    time.sleep(600)
    return x


def prints(x):
    """Traced code that writes where the worker's answers go, and reads where its jobs come from."""
    import os
    import sys

    print("not an answer", flush=True)
    os.write(1, b"nor this\n")
    assert sys.stdin.read() == ""
    return add_one(x)


def exits(x):
    raise SystemExit("enough")


def forks(x):
    """Two processes go on from here, with the same pipes."""
    import os
    import time

    if os.fork() == 0:
        time.sleep(1)
    return add_one(x)


def forks_and_aborts(x):
    import os
    import time

    if os.fork() == 0:
        time.sleep(600)
    os.abort()
    return x


def kills_a_used_process(x):
    """Stands for a compiler that only an earlier program of the same process has upset."""
    import os
    import sys

    if getattr(sys, "served_before", x.shape) != x.shape:
        os.abort()
    sys.served_before = x.shape  # pyrefly: ignore
    return add_one(x)
