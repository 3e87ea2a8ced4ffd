"""Sizes that are symbols: SymInts of torch to symbolic dimensions of jax.export, and the results back.

torch knows a size as an expression over symbols, `2*s0 + 1`, each with a range. The symbols become JAX
dimension variables d0, d1, ... under the same bounds and the expressions are rebuilt from those.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .schema import key_of

log = logging.getLogger(__name__)

# JAX prints a dimension as an expression over these.
FUNCTIONS = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


def infer(trace: Callable, shapes: tuple, dtypes: tuple, attributes: tuple, known: dict, op: str) -> list:
    """`trace` the op with symbolic sizes; [(shape, dtype)] with SymInts where a size depends on them."""
    sizes = Sizes(shapes)
    key = (sizes.signature, dtypes, key_of(attributes))
    if key not in known:
        try:
            known[key] = _printed(trace(sizes.in_jax(), dtypes, attributes))
        except Exception as error:
            return _with_guards(trace, sizes, dtypes, attributes, known, op, error)
    names = sizes.variables()
    return [(tuple(_value(size, names) for size in shape), dtype) for shape, dtype in known[key]]


class Leaf(NamedTuple):
    leaf: int


Equalities = list[tuple[int, "int | Leaf"]]  # (a leaf, the number or the earlier leaf that it equals)


class Sizes:
    """The sizes of all inputs, and the leaves (mostly plain symbols) that their expressions consist of."""

    def __init__(self, shapes: tuple):
        self.shapes = shapes
        symbolic = [s for shape in shapes if shape is not None for s in shape if isinstance(s, torch.SymInt)]
        self.env = symbolic[0].node.shape_env
        self.leaves = list(dict.fromkeys(leaf for size in symbolic for leaf in _leaves(size.node.expr)))
        self.bounds = [_bounds(self.env, leaf) for leaf in self.leaves]

    @property
    def signature(self) -> tuple:
        """Equal for sizes that differ only in what torch calls its symbols."""
        names = {leaf: f"d{i}" for i, leaf in enumerate(self.leaves)}
        return (self._map(lambda expression: _rebuilt(expression, names, text=True)), tuple(self.bounds))

    def in_jax(self, equal: Equalities | tuple = ()) -> tuple:
        """The shapes with JAX dimensions, some leaves being taken to equal a number or another leaf."""
        import jax

        scope = jax.export.SymbolicScope(list(self._constraints()))
        names = ", ".join(f"d{i}" for i in range(len(self.leaves)))
        variables = jax.export.symbolic_shape(names, scope=scope) if names else ()
        dims = [variable + min(low - 1, 0) for variable, (low, _) in zip(variables, self.bounds, strict=True)]
        for i, other in equal:
            dims[i] = other if isinstance(other, int) else dims[other.leaf]
        by_leaf = dict(zip(self.leaves, dims, strict=True))
        return self._map(lambda expression: _rebuilt(expression, by_leaf))

    def in_torch(self) -> list:
        """The leaves as SymInts."""
        return [self.env.create_symintnode(leaf, hint=None) for leaf in self.leaves]

    def variables(self) -> dict[str, Any]:
        """What JAX calls d0, d1, ... in SymInts."""
        return {
            f"d{i}": value - min(low - 1, 0)
            for i, (value, (low, _)) in enumerate(zip(self.in_torch(), self.bounds, strict=True))
        }

    def _constraints(self) -> Iterator[str]:
        # A JAX dimension variable is at least 1. A torch size may be 0: it is then written as d0 - 1.
        for i, (low, high) in enumerate(self.bounds):
            if low > 1:
                yield f"d{i} >= {low}"
            if high is not None:
                yield f"d{i} <= {high - min(low - 1, 0)}"

    def _map(self, convert: Callable) -> tuple:
        return tuple(
            None if shape is None else tuple(convert(s.node.expr) if isinstance(s, torch.SymInt) else s for s in shape)
            for shape in self.shapes
        )


def _with_guards(trace, sizes: Sizes, dtypes, attributes, known: dict, op: str, error: Exception) -> list:
    """The rule does not hold for all sizes: learn which equalities it needs, or else fix the sizes."""
    values = sizes.in_torch()
    hints = [value.node.hint for value in values]
    equal = _needed_equalities(trace, sizes, dtypes, attributes, hints)
    for i, other in equal:
        # Looked at as a bool, == becomes a guard of the graph, and torch then knows the two sizes to be one.
        if not bool(values[i] == (other if isinstance(other, int) else values[other.leaf])):
            raise AssertionError(f"{op}: {values[i]} was seen to equal {other}")
    if equal:
        return infer(trace, sizes.shapes, dtypes, attributes, known, op)
    if None in hints:
        raise RuntimeError(
            f"{op}: the output shape can't be worked out for sizes that depend on data; got {sizes.shapes}."
        ) from error
    shapes = tuple(None if shape is None else tuple(map(int, shape)) for shape in sizes.shapes)
    outputs = trace(shapes, dtypes, attributes)  # raises for a plain mistake, with numbers in the message
    log.warning(
        "%s: the JAX function does not trace with symbolic sizes (%s), so torch compiles once per size; "
        "give jax_op a shape_fn that does",
        op,
        str(error).partition("\n")[0],
    )
    return outputs


def _needed_equalities(trace, sizes: Sizes, dtypes, attributes, hints: list) -> Equalities:
    """A smallest set of equalities, true for the sizes at hand, under which the op traces. Empty: none does."""

    def works(equal: Equalities) -> bool:
        try:
            trace(sizes.in_jax(equal), dtypes, attributes)
        except Exception:
            return False
        return True

    numbers = {s for shape in sizes.shapes if shape is not None for s in shape if isinstance(s, int)}
    needed: Equalities = []
    for i, hint in enumerate(hints):
        if hint is not None:
            needed += [(i, hint)] * (hint in numbers) + [(i, Leaf(j)) for j in range(i) if hints[j] == hint]
    if not works(needed):
        return []
    for equality in list(needed):
        fewer = [other for other in needed if other != equality]
        if works(fewer):
            needed = fewer
    return needed


def _leaves(expression: Any) -> Iterator[Any]:
    if expression.is_Integer:
        return
    if _operation(expression) is None:
        yield expression
    else:
        yield from itertools.chain.from_iterable(map(_leaves, expression.args))


def _rebuilt(expression: Any, leaves: dict, text: bool = False) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression in leaves:
        return leaves[expression]
    parts = [_rebuilt(part, leaves, text) for part in expression.args]
    if text:
        return f"{type(expression).__name__}({', '.join(map(str, parts))})"
    return functools.reduce(_operation(expression), parts)  # type: ignore[arg-type]


def _operation(expression: Any) -> Callable | None:
    """How to rebuild an expression from its parts; None for one that is treated as a symbol of its own."""
    import sympy

    if not all(part.is_integer for part in expression.args):
        return None
    match type(expression).__name__:
        case "Add":
            return lambda a, b: a + b
        case "Mul":
            return lambda a, b: a * b
        case "FloorDiv" | "CleanDiv":
            return lambda a, b: a // b
        case "Mod" | "PythonMod":
            return lambda a, b: a % b
        case "Pow" if isinstance(expression.args[1], sympy.Integer) and expression.args[1] >= 0:
            return lambda a, b: a**b
    return None


def _bounds(env: Any, leaf: Any) -> tuple[int, int | None]:
    bounds = env.bound_sympy(leaf)
    low = int(bounds.lower) if bounds.lower.is_Integer else 0
    high = int(bounds.upper) if bounds.upper.is_Integer else None
    return max(low, 0), high


def _printed(outputs: list) -> list:
    """Sizes as int or as code over d0, d1, ...: free of the objects of one tracing."""
    return [
        (tuple(s if isinstance(s, int) else str(s).replace("^", "**") for s in shape), dtype)
        for shape, dtype in outputs
    ]


def _value(size: int | str, names: dict[str, Any]) -> Any:
    return size if isinstance(size, int) else eval(size, {"__builtins__": {}}, {**FUNCTIONS, **names})
