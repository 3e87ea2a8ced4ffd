"""The program around the kernels, as programs of their own: what XLA runs before, between and after them.

The compiler's profiler, which estimates XLA operations, aborts on programs with kernels whose grid depends on data.
XLA can't see into a kernel nor fuse across it, so cutting the program at its kernels leaves the operations as they
are: each piece takes what it needs as arguments and returns what a kernel, a later piece or the caller needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_hub.bench.aot.jaxprs import inner_jaxpr, run_equation

# Operations that cost nothing by themselves: a piece of nothing else is left out.
_FREE = {"reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "broadcast_in_dim"}


@dataclass(frozen=True)
class Piece:
    """A part of the program without kernels: a function of arrays, and the shapes of its arguments."""

    fn: Callable
    args: tuple[Any, ...]


@dataclass(frozen=True)
class _Step:
    """One equation, with a number for each value it reads or writes; constants stand as they are."""

    eqn: Any
    reads: tuple[Any, ...]  # int: a value's number; otherwise ("constant", value)
    writes: tuple[int, ...]


def split_at_kernels(fn: Callable, args: Sequence[Any]) -> list[Piece]:
    """The pieces of `fn(*args)` between its Pallas kernels, in order, without those that cost nothing.

    Shapes   args are `jax.ShapeDtypeStruct` (pytrees are fine)
    """
    closed = jax.make_jaxpr(fn)(*args)
    shapes: dict[int, Any] = {}
    inputs = [_name(shapes, var.aval) for var in closed.jaxpr.invars]
    steps: list[_Step] = []
    results = _flatten(closed.jaxpr, closed.consts, inputs, steps, shapes)
    level = _levels(steps)
    kernels = {id(step) for step in steps if step.eqn.primitive.name == "pallas_call"}
    pieces = []
    for number in sorted(set(level.values())):
        own = [step for step in steps if level[id(step)] == number and id(step) not in kernels]
        if all(step.eqn.primitive.name in _FREE for step in own):
            continue
        inside = {id(step) for step in own}
        made = {name for step in own for name in step.writes}
        used_outside = {r for step in steps if id(step) not in inside for r in step.reads if isinstance(r, int)}
        used_outside |= {name for name in results if isinstance(name, int)}
        takes = tuple(sorted({r for step in own for r in step.reads if isinstance(r, int)} - made))
        gives = tuple(sorted(made & used_outside))
        pieces.append(Piece(functools.partial(_run, tuple(own), takes, gives), tuple(shapes[name] for name in takes)))
    return pieces


def _name(shapes: dict[int, Any], aval: Any) -> int:
    shapes[len(shapes)] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return len(shapes) - 1


def _flatten(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], steps: list[_Step], shapes: dict[int, Any]
) -> list[Any]:
    """Append the equations of `jaxpr`, those of inner calls in place of the call; return the names of its results."""
    names: dict[Any, Any] = {var: ("constant", const) for var, const in zip(jaxpr.constvars, consts, strict=True)}
    names |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return ("constant", atom.val) if hasattr(atom, "val") else names[atom]

    for eqn in jaxpr.eqns:
        reads = [read(atom) for atom in eqn.invars]
        if (inner := inner_jaxpr(eqn)) is not None:
            writes: Sequence[Any] = _flatten(*inner, reads, steps, shapes)
        else:
            writes = [_name(shapes, var.aval) for var in eqn.outvars]
            steps.append(_Step(eqn, tuple(reads), tuple(writes)))
        names.update(zip(eqn.outvars, writes, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _levels(steps: Sequence[_Step]) -> dict[int, int]:
    """For each step the number of kernels that have to run before it, along the longest chain."""
    level_of_name: dict[int, int] = {}
    levels = {}
    for step in steps:
        own = max((level_of_name.get(r, 0) for r in step.reads if isinstance(r, int)), default=0)
        levels[id(step)] = own
        after = own + (step.eqn.primitive.name == "pallas_call")
        level_of_name.update(dict.fromkeys(step.writes, after))
    return levels


def _run(steps: Sequence[_Step], takes: Sequence[int], gives: Sequence[int], *arguments: Any) -> list[Any]:
    values = dict(zip(takes, arguments, strict=True))
    for step in steps:
        inputs = [values[r] if isinstance(r, int) else r[1] for r in step.reads]
        values.update(zip(step.writes, run_equation(step.eqn, inputs), strict=True))
    return [values[name] for name in gives]
