"""Sizes that are symbols: SymInts of torch to symbolic dimensions of jax.export, and the results back.

torch knows a size as an expression over symbols, `2*s0 + 1`, each with a range. The symbols become JAX
dimension variables d0, d1, ... under the same bounds and the expressions are rebuilt from those.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

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
    key = (sizes.signature, dtypes, attributes)
    if key not in known:
        try:
            known[key] = _printed(trace(sizes.in_jax(), dtypes, attributes))
        except Exception as error:
            return _with_guards(trace, sizes, dtypes, attributes, known, op, error)
    names = sizes.torch_values()
    return [(tuple(_value(size, names) for size in shape), dtype) for shape, dtype in known[key]]


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

    def in_jax(self, equal: dict[int, int | str] | None = None) -> tuple:
        """The shapes with JAX dimensions. `equal`: leaf -> the number or the variable it is taken to equal."""
        import jax

        scope = jax.export.SymbolicScope(list(self._constraints()))
        names = [f"d{i}" for i in range(len(self.leaves))]
        variables = jax.export.symbolic_shape(", ".join(names), scope=scope)
        values = [variable + min(low - 1, 0) for variable, (low, _) in zip(variables, self.bounds, strict=True)]
        values = [self._other(equal[i], values) if equal and i in equal else v for i, v in enumerate(values)]
        dims = dict(zip(self.leaves, values, strict=True))
        return self._map(lambda expression: _rebuilt(expression, dims))

    def torch_values(self) -> dict[str, Any]:
        """d0, d1, ... as SymInts."""
        return {
            f"d{i}": self.env.create_symintnode(leaf, hint=None) - min(low - 1, 0)
            for i, (leaf, (low, _)) in enumerate(zip(self.leaves, self.bounds, strict=True))
        }

    @staticmethod
    def _other(equal: int | str, values: list) -> Any:
        return equal if isinstance(equal, int) else values[int(equal[1:])]

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
    values = sizes.torch_values()
    equal = _needed_equalities(trace, sizes, dtypes, attributes, [v.node.hint for v in values.values()])
    # Each == below becomes a guard of the graph, after which torch knows the two sizes to be one.
    if equal and all(values[f"d{i}"] == _value(other, values) for i, other in equal.items()):
        return infer(trace, sizes.shapes, dtypes, attributes, known, op)
    if any(value.node.hint is None for value in values.values()):
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


def _needed_equalities(trace, sizes: Sizes, dtypes, attributes, hints: list) -> dict[int, int | str]:
    """A smallest set of equalities, true for the sizes at hand, under which the op traces. Empty: none does.

    A leaf may equal a size that is a plain number, or an earlier leaf.
    """

    def works(equal: dict[int, int | str]) -> bool:
        try:
            trace(sizes.in_jax(equal), dtypes, attributes)
        except Exception:
            return False
        return True

    numbers = {s for shape in sizes.shapes if shape is not None for s in shape if isinstance(s, int)}
    equal: dict[int, int | str] = {}
    for i, hint in enumerate(hints):
        if hint is None:
            continue
        if hint in numbers:
            equal[i] = hint
        elif hints.index(hint) < i:
            equal[i] = f"d{hints.index(hint)}"
    if not (equal and works(equal)):
        return {}
    for leaf in list(equal):
        fewer = {i: other for i, other in equal.items() if i != leaf}
        if fewer and works(fewer):
            equal = fewer
    return equal


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
