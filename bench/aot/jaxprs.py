"""The two things both readers of a traced program need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

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


def run_equation(jaxpr: Any, eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Run one equation by wrapping it in a jaxpr of its own."""
    arguments = {atom: value for atom, value in zip(eqn.invars, inputs, strict=True) if not hasattr(atom, "val")}
    alone = jaxpr.replace(constvars=[], invars=list(arguments), outvars=eqn.outvars, eqns=[eqn], debug_info=None)
    return jax.core.eval_jaxpr(alone, (), *arguments.values())
