"""The op that runs a kernel on a TPU, made by torch_tpu's `jax_op`.

torch_tpu traces the JAX function for the shapes at hand, lowers it for TPU and hands the program to its
runtime. Its shape rule knows concrete sizes only; for symbolic ones ours takes over.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch

from .lazy import import_jax
from .schema import Argument

PYTHON_TYPES = {"float": float, "int": int, "bool": bool, "str": str, "int[]": tuple[int, ...]}


def make_tpu_op(op: Any) -> Any:
    jax = import_jax(op.name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experimental and subject to change")
        tpu_op = _pallas(op.name).jax_op(f"{op.namespace}::{op.name}_tpu", _annotated(op, jax))
    _infer_symbolic_sizes(op, tpu_op)
    return tpu_op


def _pallas(op: str) -> Any:
    try:
        return torch.tpu.pallas  # type: ignore[attr-defined]
    except AttributeError:
        raise RuntimeError(
            f'{op}: path "pallas" runs through torch_tpu, which is not loaded here (torch has no attribute tpu). '
            f"On a TPU machine: pip install torch_tpu, then import torch_tpu."
        ) from None


def _annotated(op: Any, jax: Any) -> Any:
    """The op's JAX function with the signature of its schema, in the annotations torch_tpu reads."""
    fn = op.load()
    n = len(op.schema.tensors)
    names = [argument.name for argument in op.schema.attributes]

    def kernel(*args: Any) -> Any:
        return fn(*args[:n], **dict(zip(names, args[n:], strict=True)))

    kernel.__name__ = op.name
    returns = jax.Array if not op.schema.returns_tuple else tuple[(jax.Array,) * op.schema.n_outputs]
    parameters = [_parameter(argument, jax) for argument in op.schema.arguments]
    kernel.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return kernel


def _parameter(argument: Argument, jax: Any) -> inspect.Parameter:
    annotation = jax.Array if argument.is_tensor else PYTHON_TYPES[argument.type]
    if argument.optional:
        annotation = annotation | None
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(argument.name, kind, default=argument.default, annotation=annotation)


def _infer_symbolic_sizes(op: Any, tpu_op: Any) -> None:
    # For concrete sizes torch_tpu's rule lowers the kernel for TPU, which is a check worth keeping.
    concrete = tpu_op._abstract_fn

    @tpu_op.register_fake
    def fake(*args: Any) -> Any:
        sizes = (size for a in args if isinstance(a, torch.Tensor) for size in a.shape)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return op._fake(*args)
        return concrete(*args)
