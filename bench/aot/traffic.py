"""Count the bytes a Pallas kernel moves between HBM and VMEM, from its grid and index maps.

Pallas copies a block in when its index differs from that of the step before, and copies an output block out when its
index is about to change. So the traffic of a kernel is known once the index maps are evaluated over the grid, in order.
Index maps may read tables of scalars that were computed from the arguments (the routing of tokens to experts); those
are evaluated too, for the argument values that are given.

Copies a kernel starts by itself (`make_async_copy` on refs in HBM) are not visible here; such operands are reported as
uncounted instead of being left out silently.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src.state.discharge import (
    discharge_state,
)  # index maps read tables through refs; no public way to run them

from pallas_hub.bench.aot.jaxprs import inner_jaxpr, run_equation

# Larger intermediate values are not evaluated: tables of block indices are small.
_MAX_ELEMENTS = 1 << 22
_MAX_STEPS = 1 << 23  # of a grid that is walked: some hundred bytes each


class TrafficUnknown(ValueError):
    """The traffic depends on argument values that were not given, or on copies the kernel makes by itself."""


@dataclass(frozen=True)
class Operand:
    """Traffic of one input or output of a kernel."""

    origin: str  # argument name in the kernel
    shape: tuple[int, ...]
    block: tuple[int, ...]
    copies: int
    bytes: int
    counted: bool  # False: the kernel moves it by itself


@dataclass(frozen=True)
class Traffic:
    """Traffic of one Pallas kernel."""

    kernel: str
    grid: tuple[int, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    vmem_limit_bytes: int | None = None  # what the kernel asks for; None: the compiler's default

    @property
    def steps(self) -> int:
        return math.prod(self.grid)

    @property
    def bytes(self) -> int:
        return sum(operand.bytes for operand in (*self.inputs, *self.outputs))

    @property
    def counted(self) -> bool:
        return all(operand.counted for operand in (*self.inputs, *self.outputs))

    @property
    def fill_bytes(self) -> int:
        """One block of every operand: what is copied before the first step and after the last."""
        return sum(operand.bytes // max(operand.copies, 1) for operand in (*self.inputs, *self.outputs))

    def as_numbers(self) -> dict[str, Any]:
        """What the report needs, as JSON can hold it."""
        return {
            "kernel": self.kernel,
            "steps": self.steps,
            "bytes": self.bytes if self.counted else None,
            "fill_bytes": self.fill_bytes,
            "vmem_limit_bytes": self.vmem_limit_bytes,
        }


def count_traffic(fn: Callable, args: Sequence[Any], *, device: Any = None, **static: Any) -> list[Traffic]:
    """Traffic of every Pallas kernel that `fn(*args, **static)` runs, in order.

    Shapes   args are `jax.ShapeDtypeStruct` where only the shape matters and numpy arrays where index maps or the
             grid depend on the values (group sizes, page tables)
    Device   the one that code asks for while it is traced; None: JAX's default
    Raises   TrafficUnknown: a grid or an index map depends on an argument given as a shape only, or is too long.
    """
    shapes = [jax.tree.map(_shape_of, arg) for arg in args]
    with jax.default_device(device) if device is not None else contextlib.nullcontext():
        closed = jax.make_jaxpr(lambda *a: fn(*a, **static))(*shapes)
    known = [leaf if isinstance(leaf, np.ndarray | np.generic) else None for leaf in jax.tree.leaves(args)]
    found: list[Traffic] = []
    _evaluate(closed.jaxpr, closed.consts, known, found)
    return found


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], found: list[Traffic]) -> list[Any]:
    """Run what can be run with the known values; collect the kernels. Unknown values are None."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values.get(atom)

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "pallas_call":
            found.append(_kernel_traffic(eqn, inputs))
            outputs: Sequence[Any] = [None] * len(eqn.outvars)
        elif (inner := inner_jaxpr(eqn)) is not None:
            outputs = _evaluate(*inner, inputs, found)
        elif eqn.primitive.name == "device_put":
            outputs = inputs  # to a device that is only described, as for a mesh of one: the values stay
        elif any(value is None for value in inputs) or not _small(eqn):
            outputs = [None] * len(eqn.outvars)
        else:
            outputs = run_equation(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _small(eqn: Any) -> bool:
    return all(math.prod(var.aval.shape) <= _MAX_ELEMENTS for var in (*eqn.invars, *eqn.outvars))


def _kernel_traffic(eqn: Any, inputs: Sequence[Any]) -> Traffic:
    mapping = eqn.params["grid_mapping"]
    name = str(eqn.params.get("name") or "kernel")
    bounds = list(inputs[: mapping.num_dynamic_grid_bounds])
    tables = inputs[mapping.num_dynamic_grid_bounds :][: mapping.num_index_operands]
    if any(bound is None for bound in bounds):
        raise TrafficUnknown(f"{name}: the grid depends on an argument given as a shape only; give its values.")
    grid = tuple(size if isinstance(size, int) else int(bounds.pop(0)) for size in mapping.grid)
    if math.prod(grid) > _MAX_STEPS:
        raise TrafficUnknown(f"{name}: a grid of {math.prod(grid)} steps is not walked, only up to {_MAX_STEPS}.")
    axes = [axis.ravel() for axis in np.indices(grid)]
    steps = np.stack(axes, axis=1).astype(np.int32) if axes else np.zeros((1, 0), np.int32)  # (steps, grid axes)
    operands = [_operand_traffic(name, block, steps, tables) for block in mapping.block_mappings]
    inputs_outputs = tuple(operands[: mapping.num_inputs]), tuple(operands[mapping.num_inputs :])
    return Traffic(name, grid, *inputs_outputs, _vmem_limit(eqn.params.get("compiler_params")))


def _vmem_limit(params: Any) -> int | None:
    """From the parameters of a pallas_call: an object, or in older releases one per platform."""
    if isinstance(params, Mapping):
        params = params.get("mosaic_tpu", params.get("mosaic", params))
    return params.get("vmem_limit_bytes") if isinstance(params, Mapping) else getattr(params, "vmem_limit_bytes", None)


def _operand_traffic(kernel: str, block: Any, steps: np.ndarray, tables: Sequence[Any]) -> Operand:
    shape = tuple(block.array_aval.shape)
    sizes = tuple(1 if size is None else int(getattr(size, "block_size", 1)) for size in block.block_shape)
    space = str(getattr(block.transformed_block_aval, "memory_space", None)).lower()
    if "any" in space or "hbm" in space:
        return Operand(str(block.origin), shape, sizes, copies=0, bytes=0, counted=False)
    indices = _block_indices(kernel, block, steps, tables)  # (steps, dimensions)
    changed = np.ones(len(indices), dtype=bool)
    changed[1:] = (indices[1:] != indices[:-1]).any(axis=1)
    fetched = indices[changed].astype(np.int64)
    # The last block of a dimension is cut at the array's end.
    extent = np.clip(np.array(shape) - fetched * np.array(sizes), 0, np.array(sizes))
    nbytes = int(extent.prod(axis=1).sum()) * block.array_aval.dtype.itemsize
    return Operand(str(block.origin), shape, sizes, int(changed.sum()), nbytes, counted=True)


def _block_indices(kernel: str, block: Any, steps: np.ndarray, tables: Sequence[Any]) -> np.ndarray:
    closed = block.index_map_jaxpr
    discharged = discharge_state(closed)
    jaxpr, consts = discharged.jaxpr, discharged.consts
    used = {var for eqn in jaxpr.eqns for var in eqn.invars if not hasattr(var, "val")}
    arguments = jaxpr.invars[steps.shape[1] :]
    for var, table in zip(arguments, tables, strict=True):
        if table is None and var in used:
            raise TrafficUnknown(f"{kernel}: {block.origin} is indexed by an argument given as a shape only.")
    values = [np.zeros(v.aval.shape, v.aval.dtype) if t is None else t for v, t in zip(arguments, tables, strict=True)]
    rank = len(block.block_shape)

    def one_step(step: Any) -> Any:
        return jax.core.eval_jaxpr(jaxpr, consts, *step, *values)[:rank]

    per_axis = jax.jit(jax.vmap(one_step))(steps)
    return np.stack([np.broadcast_to(np.asarray(axis), (len(steps),)) for axis in per_axis], axis=1)
