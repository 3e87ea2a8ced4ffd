"""Compile a JAX function for a real TPU generation on a machine without a TPU.

libtpu holds the whole TPU compiler and accepts a topology description in place of a device. What comes back was
*compiled*, not run: it proves that the kernel lowers, is aligned and fits VMEM on that generation. It says nothing
about speed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

# Target name -> topology understood by libtpu (one chip or the smallest slice it accepts).
TARGETS: dict[str, str] = {
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}

# libtpu asks a metadata server who it is unless told, and takes a machine-wide lock unless others may load it too.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class LibtpuMissing(ImportError):
    """libtpu, which holds the TPU compiler, is not installed."""


@functools.cache
def tpu_device(target: str) -> Any:
    """The first device of `target`'s topology: a description to compile for, not hardware.

    Raises   ValueError: unknown target.  LibtpuMissing: no libtpu in this environment.
    """
    if target not in TARGETS:
        raise ValueError(f"tpu_compile: target must be one of {', '.join(TARGETS)}; got {target!r}.")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise LibtpuMissing(
            "tpu_compile: the TPU compiler needs libtpu (Linux x86-64); try `pip install libtpu`."
        ) from error
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=TARGETS[target]).devices[0]


def compile_for_tpu(
    fn: Callable,
    *args: Any,
    target: str = "v6e",
    options: dict[str, str | bool] | None = None,
    **static: Any,
) -> Any:
    """Compile `fn(*args, **static)` for one TPU generation and return jax's compiled object.

    Shapes   args are `jax.ShapeDtypeStruct` (or arrays, of which only shape and dtype count; pytrees are fine)
    Options  of the TPU compiler, as {"xla_tpu_...": value}
    Raises   what the TPU compiler raises; ValueError: unknown target; LibtpuMissing
    """
    device = tpu_device(target)
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)

    def on_target(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    placed = jax.tree.map(on_target, args)
    with jax.default_device(device):  # for code that asks jax which TPU it is traced for
        lowered = jax.jit(functools.partial(fn, **static)).trace(*placed).lower(lowering_platforms=("tpu",))
    return lowered.compile(compiler_options=options or {})
