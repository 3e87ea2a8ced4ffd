"""The program around the kernels: the same XLA operations, with an empty kernel in place of each Pallas kernel.

The compiler's profiler, which estimates XLA operations, aborts on kernels whose grid depends on data. An empty kernel
with the same operands and results is as opaque to XLA as the real one, so the operations around it stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_hub.bench.aot.jaxprs import inner_jaxpr, run_equation

# Operations that cost nothing by themselves.
_FREE = {
    "reshape",
    "squeeze",
    "expand_dims",
    "stop_gradient",
    "copy",
    "jit",
    "pjit",
    "pallas_call",
    "broadcast_in_dim",
}


def without_kernels(fn: Callable, args: Sequence[Any]) -> Callable | None:
    """`fn` with its Pallas kernels emptied; None when nothing that costs time surrounds them."""
    closed = jax.make_jaxpr(fn)(*args)
    if not any(name not in _FREE for name in _primitives(closed.jaxpr)):
        return None

    def emptied(*arguments: Any) -> Any:
        return _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))

    return emptied


def _primitives(jaxpr: Any) -> set[str]:
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        if (inner := inner_jaxpr(eqn)) is not None:
            names |= _primitives(inner[0])
    return names


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "pallas_call":
            outputs: Sequence[Any] = _empty_kernel(eqn, inputs)
        elif (inner := inner_jaxpr(eqn)) is not None:
            outputs = _run(*inner, inputs)
        else:
            outputs = run_equation(jaxpr, eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _empty_kernel(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    # Scalars (dynamic grid bounds) travel as arrays of one element: a kernel operand needs a shape.
    operands = [value.reshape(1) if value.ndim == 0 else value for value in inputs]
    results = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
    return pl.pallas_call(
        lambda *refs: None,
        in_specs=[_in_place(operand) for operand in operands],
        out_specs=[_in_place(result) for result in results],
        out_shape=results,
        name="emptied",
    )(*operands)


def _in_place(array: Any) -> pl.BlockSpec:
    """No copy into VMEM. Lists of scalars go to scalar memory, where the tables of a real kernel go too."""
    return pl.BlockSpec(memory_space=pltpu.SMEM if len(array.shape) == 1 else pltpu.HBM)
