"""Run an op's JAX function on CPU tensors: one jitted function per set of attributes.

JAX traces once per set of attributes and input shapes and dtypes, that is once per length when lengths
vary; `CpuRunner.traces` counts. On CPU nothing is padded to buckets: a trace costs milliseconds once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .exchange import fresh, to_numpy, to_torch
from .lazy import import_jax
from .schema import Schema, key_of
from .state import state


class CpuRunner:
    def __init__(self, op: str, schema: Schema, load: Callable[[], Callable]):
        self.op, self.schema, self.load = op, schema, load
        self.names = tuple(argument.name for argument in schema.tensors)
        self.traces = 0
        self._jitted: dict[Any, Callable] = {}

    def __call__(self, tensors: tuple, attributes: tuple, interpret: Any) -> Any:
        """`interpret` is None for a function that does not take it."""
        if state.forked_after_jax:
            raise RuntimeError(
                f"{self.op}: JAX had started before this process was forked, and does not survive a fork. "
                f'Start workers with "spawn" or "forkserver", for a DataLoader multiprocessing_context="spawn".'
            )
        key = key_of(attributes), interpret
        jitted = self._jitted.get(key)
        if jitted is None:
            jitted = self._jitted[key] = self._jit(attributes, interpret)
        arrays = []
        for tensor, name in zip(tensors, self.names, strict=True):
            arrays.append(None if tensor is None else to_numpy(tensor, self.op, name))
        # Ready outputs mean that the inputs were read: whatever the caller does to them next is safe.
        result = jitted(*arrays)
        if self.schema.returns_tuple:
            return tuple([to_torch(output.block_until_ready()) for output in result])
        return to_torch(result.block_until_ready())

    def _jit(self, attributes: tuple, interpret: Any) -> Callable:
        jax, fn = import_jax(self.op), self.load()
        keywords = dict(zip((a.name for a in self.schema.attributes), attributes, strict=True))
        if interpret is not None:
            keywords["interpret"] = interpret

        def traced(*arrays: Any) -> Any:
            self.traces += 1
            outputs = fresh(run(fn, arrays, keywords, self.schema, self.op), arrays)
            return outputs if self.schema.returns_tuple else outputs[0]

        if jax.default_backend() == "cpu":
            return jax.jit(traced)
        # A user's JAX may prefer an accelerator; these tensors are on the CPU and stay there.
        cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        return jax.jit(traced, in_shardings=cpu, out_shardings=cpu)


def run(fn: Callable, arrays: Sequence, keywords: dict, schema: Schema, op: str) -> list:
    """The outputs of the op's JAX function, as many as the schema says; its errors tell whose they are."""
    try:
        result = fn(*arrays, **keywords)
    except Exception as error:
        error.add_note(f"This was raised while JAX traced {op}.")
        raise
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    if len(outputs) != schema.n_outputs or isinstance(result, tuple | list) != schema.returns_tuple:
        wanted = f"a tuple of {schema.n_outputs}" if schema.returns_tuple else "one array"
        came = f"a tuple of {len(outputs)}" if isinstance(result, tuple | list) else type(result).__name__
        raise TypeError(f"{op}: the JAX function must return {wanted}, as its annotation says; got {came}.")
    return outputs
