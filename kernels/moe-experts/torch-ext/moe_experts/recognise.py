"""Which activation and gate an experts module of Transformers applies, found by what its functions compute.

The fused op takes names, and a module brings functions: its act_fn and its _apply_gate. Once per kind of module they
are evaluated on a few numbers that tell all names, layouts and limits apart. Functions that compute nothing with a
name stay functions, and the layer runs as torch code.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .checks import NAMES
from .torch_path import Activation, Gate, gate_function

_PLAIN = (bool, int, float, str, type(None))
_MISSING, _NOT_PLAIN = "missing", "a tensor, a config, a module, ..."  # a missing name may be a global, or of the class
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type(None))
_OWN = {"act_fn", "_apply_gate"}
_found: dict[tuple, Between | None] = {}


class Between(NamedTuple):
    """What lies between the two products, as moe_experts takes it."""

    activation: Activation
    gate: Gate
    limit: float | None = None


def functions_of(module: Any) -> Between:
    """The module's own functions; the activation is unused where _apply_gate brings its own."""
    return Between(getattr(module, "act_fn", "silu"), module._apply_gate if module.has_gate else None)


def names_of(module: Any) -> Between:
    """Names for what the module's functions compute; where there are none, the functions."""
    if "_apply_gate" in module.__dict__:  # its own, not its class's
        return functions_of(module)
    key = _key(module)
    if not _is_known(key):
        _look_at(module)
    return _lookup(key) or functions_of(module)


def _constant(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result without its import of the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _is_known(key: tuple) -> bool:
    return key in _found


@_constant
def _lookup(key: tuple) -> Between | None:
    return _found[key]


@_constant
def _look_at(module: Any) -> bool:
    """Find the module's names. A graph that is being compiled is tied to this module by it, but to no later one."""
    _found[_key(module)] = _compare(module)
    return True


def _key(module: Any) -> tuple:
    """All that the module's functions depend on: their code, and the numbers that this code reads from the module."""
    act = getattr(module, "act_fn", None)
    values = _values(module, _names_read(type(module), "_apply_gate"))
    return type(module), module.has_gate, values, _parts(act), _values(act, _names_read(type(act), "forward"))


def _parts(function: Any) -> Any:
    """What tells a function apart: a module by its type, a partial by what it holds, a function by being itself."""
    if isinstance(function, nn.Module):
        return type(function)
    if isinstance(function, functools.partial):
        named = tuple(sorted(function.keywords.items()))
        plain = all(isinstance(value, _PLAIN) for value in (*function.args, *function.keywords.values()))
        return (
            (function.func, *function.args, *named) if plain and isinstance(function.func, _FUNCTIONS) else _NOT_PLAIN
        )
    return function if isinstance(function, _FUNCTIONS) else _NOT_PLAIN


def _values(thing: Any, names: tuple[str, ...]) -> tuple:
    if not isinstance(thing, nn.Module):
        return ()
    held, tensors = thing.__dict__, (thing._parameters, thing._buffers, thing._modules)
    values = [held.get(name, _MISSING) for name in names]  # a class attribute belongs to the class, which is in the key
    values = [
        _NOT_PLAIN if value is _MISSING and any(name in part for part in tensors) else value
        for name, value in zip(names, values, strict=True)
    ]
    if torch.compiler.is_compiling():  # a number may be a symbol then: the graph is made for what it is now
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        values = [guard_scalar(value) if isinstance(value, int | float) else value for value in values]
    return tuple([_value(thing, value) for value in values])


def _value(thing: nn.Module, value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, types.MethodType) and value.__self__ is thing:
        return value.__func__
    return _NOT_PLAIN if isinstance(value, nn.Module) else _parts(value)


@_constant
def _names_read(cls: type, method: str) -> tuple[str, ...]:
    """Names of all attributes that a method may read from self, and those that its class's other methods may."""
    names: dict[str, None] = {}
    todo: list[Any] = [getattr(cls, method, None)]
    while todo:
        item = todo.pop()
        if isinstance(item, property):
            todo.append(item.fget)
        elif isinstance(item, types.CodeType):
            # A constant may be the name in getattr(self, "limit", None), or the code of a function in the function.
            texts = [text for text in item.co_consts if isinstance(text, str) and text.isidentifier()]
            new = [name for name in (*item.co_names, *texts) if name not in _OWN and name not in names]
            names.update(dict.fromkeys(new))
            todo += [part for part in item.co_consts if isinstance(part, types.CodeType)]
            # A name of torch's own Module, as float, is a tensor's here.
            todo += [getattr(cls, name, None) for name in new if not hasattr(nn.Module, name)]
        elif isinstance(item, types.FunctionType):
            inner = inspect.unwrap(item)
            todo.append(inner.__code__)
            if inner is not item:
                todo.append(item.__code__)
    return tuple(names)


def _compare(module: Any) -> Between | None:
    # Only what the key holds: a function that reads anything else from its module is not recognised.
    act, names = getattr(module, "act_fn", None), _names_read(type(module), "_apply_gate")
    values = _values(module, names)
    read = (*values, _parts(act), *_values(act, _names_read(type(act), "forward")))
    if _NOT_PLAIN in read or _holds_tensors(act):
        return None
    twin = object.__new__(type(module))
    held = {name: value for name, value in zip(names, values, strict=True) if value is not _MISSING}
    twin.__dict__.update(held, act_fn=act)
    function = twin._apply_gate if module.has_gate else twin.act_fn
    limits = [float(value) for value in held.values() if type(value) in (int, float) and value > 0]
    with _plainly():
        x = _sample(limits)
        try:
            result = function(x.clone())
        except Exception:  # it may ask for anything
            return None
        if not isinstance(result, Tensor):
            return None
        for candidate in _candidates(module.has_gate, limits):
            activation, gate, limit = candidate
            wanted = gate_function(activation, gate, limit)(x)
            # Two float32 evaluations of one function differ by less, two functions of different names by more.
            if result.shape == wanted.shape and torch.allclose(result.float(), wanted, rtol=1e-5, atol=2e-5):
                return Between(activation, gate, limit)
    return None


def _holds_tensors(act: Any) -> bool:
    """Then two of one type may differ, or one from itself later."""
    return isinstance(act, nn.Module) and any((act._parameters, act._buffers, act._modules))


def _candidates(has_gate: bool, limits: list[float]) -> Iterator[tuple[str, str | None, float | None]]:
    for name in NAMES:
        if not has_gate:
            if name != "swiglu_oss":
                yield name, None, None
            continue
        for gate in ("concatenated", "interleaved"):
            for limit in (None, *limits):
                yield name, gate, limit


def _sample(limits: list[float]) -> Tensor:
    """(128, 16): numbers on both sides of zero and of each limit, paired at random, no two columns alike."""
    sizes = [0.0, 1e-3, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 20.0]
    sizes += [limit * factor for limit in limits for factor in (0.9, 1.0, 1.1, 2.0)]
    points = torch.tensor([*sizes, *(-size for size in sizes)], dtype=torch.float32, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(0)
    return points[torch.randint(len(points), (128, 16), generator=generator, device="cpu")]


@contextmanager
def _plainly() -> Generator[None]:
    """Real numbers, whatever surrounds the call: tracing, fake tensors, autocast, autograd."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield
