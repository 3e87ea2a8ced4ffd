"""torch.func.vmap of the ops: the mapped axis joins the batch, so that one call serves all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ._bridge.vmap import loop

BIAS, SLOPES, SINKS = 5, 6, 7  # places among the arguments; what comes before and behind them has the batch first


def batch_forward(op: Any) -> Callable:
    return _rule(op, outputs_with_batch=(0, 1))


def batch_backward(op: Any) -> Callable:
    return _rule(op, outputs_with_batch=(0, 1, 2))


def _rule(op: Any, outputs_with_batch: tuple[int, ...]) -> Callable:
    tensors = len(op.schema.tensors)

    def batched(info: Any, in_dims: tuple, *args: Any) -> tuple:
        shared = (BIAS, SLOPES, SINKS)
        if not info.batch_size or any(in_dims[i] is not None for i in shared):
            return loop(op, info, in_dims, *args)
        if len(outputs_with_batch) == 3 and (args[BIAS] is not None or args[SINKS] is not None):
            return loop(op, info, in_dims, *args)  # their gradients would be summed over the mapped axis
        n, b = info.batch_size, _batch(args[0], in_dims[0])
        if args[BIAS] is not None and args[BIAS].shape[0] > 1:
            return loop(op, info, in_dims, *args)
        if args[SLOPES] is not None and args[SLOPES].dim() > 1:
            return loop(op, info, in_dims, *args)
        joined = [
            arg if i >= tensors or i in shared or arg is None else _join(arg, in_dims[i], n)
            for i, arg in enumerate(args)
        ]
        results = op(*joined)
        split = tuple(r.unflatten(0, (n, b)) if i in outputs_with_batch else r for i, r in enumerate(results))
        return split, tuple(0 if i in outputs_with_batch else None for i in range(len(results)))

    return batched


def _batch(tensor: Tensor, dim: int | None) -> int:
    return tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]


def _join(tensor: Tensor, dim: int | None, n: int) -> Tensor:
    mapped = tensor.expand(n, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)
