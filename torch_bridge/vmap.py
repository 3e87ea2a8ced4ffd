"""The rule of last resort for torch.func.vmap: one call per element, then stack."""

from __future__ import annotations

from typing import Any

import torch


def loop(op: Any, info: Any, in_dims: tuple, *args: Any) -> tuple:
    """Right for every op. `set_vmap` gives an op a faster rule, with these arguments."""
    if info.batch_size == 0:
        return _empty(op, in_dims, args)
    results = []
    for i in range(info.batch_size):
        one = [a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True)]
        results.append(op(*one))
    if not op.schema.returns_tuple:
        return torch.stack(results), 0
    return tuple(torch.stack(column) for column in zip(*results, strict=True)), (0,) * op.schema.n_outputs


def _empty(op: Any, in_dims: tuple, args: tuple) -> tuple:
    one = [
        a if dim is None else a.new_zeros(a.shape[:dim] + a.shape[dim + 1 :])
        for a, dim in zip(args, in_dims, strict=True)
    ]
    result = op(*one)
    if not op.schema.returns_tuple:
        return result.new_empty((0, *result.shape)), 0
    return tuple(r.new_empty((0, *r.shape)) for r in result), (0,) * op.schema.n_outputs
