"""The gradient of an op: a rule in plain torch code, or a JAX function that becomes an op of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .paths import requested_by_context, under
from .schema import Schema

_below_autograd = torch._C._AutoDispatchBelowAutograd
_NOTHING = contextlib.nullcontext()
_functorch_is_active = torch._C._are_functorch_transforms_active
_any_requires_grad = torch._C._any_requires_grad


class Rule:
    """How to go back through an op: `fn(saved, needs, *grads)`, and what to save for it."""

    def __init__(self, fn: Callable, save: Iterable[str] | Callable | None, schema: Schema, op: str):
        self.fn, self.op = fn, op
        self.names = [argument.name for argument in schema.tensors]
        self.outputs = output_names(schema)
        self.save = save if callable(save) else self._checked(self.names if save is None else save)

    def to_save(self, needs: SimpleNamespace) -> tuple[str, ...]:
        return self._checked(self.save(needs)) if callable(self.save) else self.save

    def _checked(self, save: Iterable[str]) -> tuple[str, ...]:
        known = [*self.names, "outputs", *self.outputs]
        if isinstance(save, str) or not set(save) <= set(known):
            came = repr(save) if isinstance(save, str) else list(save)
            raise ValueError(f"{self.op}: save must list names of tensor inputs, or outputs, of {known}; got {came}.")
        expanded = (self.outputs if name == "outputs" else (name,) for name in save)
        return tuple(itertools.chain.from_iterable(expanded))


def output_names(schema: Schema) -> tuple[str, ...]:
    return tuple(f"outputs[{i}]" for i in range(schema.n_outputs))


class Saved:
    """What a backward rule may look at: `saved.<input>`, `saved.<attribute>`, `saved.outputs[i]`, None if not saved."""

    def __init__(self, op: str, values: dict[str, Any]):
        self.__dict__.update(values, _op=op)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._op}: {name} was not saved for the backward; name it in set_backward(..., save=...)."
        )


def make_kernel(op: Any) -> Callable:
    """The kernel that the dispatcher calls for any tensor that may need a gradient."""
    overload, tensors, attributes = op.overload, op.schema.tensors, op.schema.attributes
    names, names_of_outputs = [argument.name for argument in tensors], output_names(op.schema)

    def forward(ctx: Any, *args: Any) -> Any:
        # torch calls this without grad mode. In nested torch.func transforms, an outer level must still record.
        with torch.set_grad_enabled(_functorch_is_active()), _below_autograd():
            result = overload(*args)
        outputs = result if isinstance(result, tuple) else (result,)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        ctx.forced = requested_by_context()
        ctx.attributes = args[len(tensors) :]
        if op.rule is not None:
            available = dict(zip((*names, *names_of_outputs), (*args[: len(names)], *outputs), strict=True))
            ctx.saved_names = op.rule.to_save(_needs(ctx))
            ctx.save_for_backward(*(available[name] for name in ctx.saved_names))
        return result

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        if op.rule is None:
            raise NotImplementedError(
                f"{op.name}: has no gradient. If this is the backward of another op, "
                f"a gradient of a gradient was asked for, and that is not supported."
            )
        needs = _needs(ctx)
        with under(ctx.forced), without_autocast(grads[0].device.type):
            result = op.rule.fn(_saved(ctx), needs, *grads)
        result = result if isinstance(result, tuple | list) else (result,)
        if len(result) != len(names):
            raise TypeError(
                f"{op.name}: the backward must return one entry for each of {', '.join(names)}; got {len(result)}."
            )
        asked = (grad if getattr(needs, name) else None for name, grad in zip(names, result, strict=True))
        return (*asked, *(None for _ in attributes))

    def _needs(ctx: Any) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(names, ctx.needs_input_grad, strict=False)))

    def _saved(ctx: Any) -> Saved:
        values = dict(zip((a.name for a in attributes), ctx.attributes, strict=True))
        values.update(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
        outputs = tuple(values.pop(name, None) for name in names_of_outputs)
        if any(output is not None for output in outputs):
            values["outputs"] = outputs
        return Saved(op.name, values)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"{op.name}_autograd", (torch.autograd.Function,), members)

    def kernel(*args: Any) -> Any:
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return _apply(function, op.fill_defaults(args))
        if forward_ad._current_level >= 0:
            _refuse_tangents(op.name, args)
        with _below_autograd():
            return overload(*args)

    return kernel


def without_autocast(device: str) -> Any:
    """An op computes in the dtypes it was given, as its fake says, also inside torch.autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def _refuse_tangents(op: str, args: tuple) -> None:
    for arg in args:
        if isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(f"{op}: has no forward-mode derivative; use reverse mode (backward, grad, vjp).")


def _apply(function: Any, args: tuple) -> Any:
    """`function.apply`, also inside torch.func.grad, which torch's own custom ops do not support.

    There the dispatcher has already brought us to the level whose gradient is wanted, so the function is to
    be applied at that level alone; `apply` would start over from the outermost one and refuse.
    """
    if not _functorch_is_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)
