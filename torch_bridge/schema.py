"""The torch schema of an op, read from the annotations of the function behind it.

    def scale(x: jax.Array, bias: jax.Array | None, factor: float = 2.0) -> jax.Array
    (Tensor x, Tensor? bias, float factor=2.0) -> Tensor

Annotations are compared as text, so that reading them needs neither JAX nor the names in scope.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TENSOR_NAMES = {"Tensor", "torch.Tensor", "Array", "jax.Array", "jnp.ndarray"}
ATTRIBUTE_TYPES = {
    "float": "float",
    "int": "int",
    "bool": "bool",
    "str": "str",
    "tuple[int, ...]": "int[]",
    "list[int]": "int[]",
    "Sequence[int]": "int[]",
}
RULE = "Tensor or jax.Array, float, int, bool, str, tuple[int, ...], or one of these with `| None`"


@dataclass(frozen=True)
class Argument:
    name: str
    type: str  # as in a torch schema, without the question mark
    optional: bool
    default: Any = inspect.Parameter.empty

    @property
    def is_tensor(self) -> bool:
        return self.type == "Tensor"

    def __str__(self) -> str:
        text = f"{self.type}{'?' if self.optional else ''} {self.name}"
        return text if self.default is inspect.Parameter.empty else f"{text}={_literal(self.default)}"


@dataclass(frozen=True)
class Schema:
    tensors: tuple[Argument, ...]
    attributes: tuple[Argument, ...]
    n_outputs: int
    returns_tuple: bool

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return self.tensors + self.attributes

    def __str__(self) -> str:
        arguments = ", ".join(map(str, self.arguments))
        returns = ", ".join(["Tensor"] * self.n_outputs)
        return f"({arguments}) -> {f'({returns})' if self.returns_tuple else returns}"


def key_of(attributes: tuple) -> Any:
    """A dict key that tells attributes apart as a program does: -0.0 is not 0.0, and NaN is itself."""
    for value in attributes:
        if type(value) is float and (not value or value != value):
            return repr(attributes)
    return attributes


def schema_of(function: Callable, op: str) -> Schema:
    """Parameters named `interpret` belong to the bridge and are left out."""
    signature = inspect.signature(function)
    arguments = [
        _argument(parameter, op) for parameter in signature.parameters.values() if parameter.name != "interpret"
    ]
    tensors = tuple(a for a in arguments if a.is_tensor)
    if tensors != tuple(arguments[: len(tensors)]):
        order = ", ".join(a.name for a in arguments)
        raise TypeError(f"{op}: tensors must come before attributes; got ({order}).")
    if not tensors or tensors[0].optional:
        raise TypeError(f"{op}: the first parameter must be a tensor that is always given.")
    n_outputs, returns_tuple = _returns(signature.return_annotation, op)
    return Schema(tensors, tuple(arguments[len(tensors) :]), n_outputs, returns_tuple)


def _argument(parameter: inspect.Parameter, op: str) -> Argument:
    text = _text(parameter.annotation)
    bare, optional = _without_none(text)
    if bare in TENSOR_NAMES:
        kind = "Tensor"
    elif bare in ATTRIBUTE_TYPES:
        kind = ATTRIBUTE_TYPES[bare]
    else:
        came = text if parameter.annotation is not inspect.Parameter.empty else "no annotation"
        raise TypeError(f"{op}: parameter {parameter.name} must be annotated as {RULE}; got {came}.")
    return Argument(parameter.name, kind, optional, parameter.default)


def _returns(annotation: Any, op: str) -> tuple[int, bool]:
    text = _text(annotation)
    if text in TENSOR_NAMES:
        return 1, False
    inside = re.fullmatch(r"[Tt]uple\[(.*)\]", text)
    names = [name.strip() for name in inside.group(1).split(",")] if inside else []
    if len(names) > 1 and all(name in TENSOR_NAMES for name in names):
        return len(names), True
    raise TypeError(
        f"{op}: the return annotation must be Tensor, or for several outputs a tuple like tuple[Tensor, Tensor]; "
        f"got {text}."
    )


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return "nothing"
    if annotation is None or annotation is types.NoneType:
        return "None"
    if isinstance(annotation, str):
        return annotation.strip().removeprefix("typing.")
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(_text(part) for part in typing.get_args(annotation))
    if typing.get_origin(annotation) is not None:
        parts = ("..." if part is Ellipsis else _text(part) for part in typing.get_args(annotation))
        return f"{typing.get_origin(annotation).__name__}[{', '.join(parts)}]"
    return getattr(annotation, "__name__", str(annotation)).rpartition(".")[2]


def _without_none(text: str) -> tuple[str, bool]:
    if inside := re.fullmatch(r"Optional\[(.*)\]", text):
        return inside.group(1).strip(), True
    parts = [part.strip() for part in text.split("|")]
    return " | ".join(part for part in parts if part != "None"), "None" in parts


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
