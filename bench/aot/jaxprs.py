"""The two things both readers of a traced program need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Their bodies run zero or many times, with other arguments than the equation's own.
_CONTROL_FLOW = ("while", "scan", "cond", "pallas_call")


def inner_jaxpr(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The body of a call-like equation (jit, custom_vjp, ...) and its constants; None for anything else."""
    if eqn.primitive.name in _CONTROL_FLOW:
        return None
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    if inner is None or not hasattr(inner, "eqns"):
        return None
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())


def run_equation(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation for these values of what it reads: numbers, or tracers inside another trace."""
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]
