"""Ops of Tokamax as torch ops. Made from tokamax.toml; edit that."""

from __future__ import annotations

from torch import Tensor

from ._bridge import jax_op
from ._tokamax import ResultShapes, Rule, TokamaxCall, check

KERNEL = "tokamax-ragged-dot"


def _declare(op, signature, rules, results, tpu, cpu):
    """One op per device, so that record_paths tells which ran."""
    shapes = ResultShapes(rules, results)
    for device, implementations in (("tpu", tpu), ("cpu", cpu)):
        call = TokamaxCall(op, KERNEL, ".kernel", __package__, device, implementations, len(rules))
        options = {"fn": call, "vjp": call.vjp, "shape_fn": shapes, "signature": signature}
        yield jax_op(f"{op}_{device}", namespace=__package__, **options)


def _ragged_dot_signature(lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> Tensor: ...


_ragged_dot_rules = (
    Rule("lhs", ("m", "k")),
    Rule("rhs", ("g", "k", "n")),
    Rule("group_sizes", ("g",), "int"),
)
_ragged_dot_results = (Rule("lhs", ("m", "n")),)
_ragged_dot_tpu, _ragged_dot_cpu = _declare(
    "ragged_dot",
    _ragged_dot_signature,
    _ragged_dot_rules,
    _ragged_dot_results,
    tpu=("mosaic", "xla"),
    cpu=("xla",),
)


def ragged_dot(lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> Tensor:
    """Multiply contiguous groups of rows of `lhs`, each by its own matrix of `rhs`; other rows are zero.

    Shapes   lhs (m, k), rhs (g, k, n), group_sizes (g,)  ->  (m, n)
    Dtypes   lhs, rhs: float32, bfloat16, float16; group_sizes: int32, int64
    Grads    of every float tensor, first order
    Raises   ValueError: shapes that do not match.  TypeError: a dtype outside the list.  ImportError: no tokamax
    Runs     on TPU mosaic or else xla, on CPU xla
    Source   tokamax.ragged_dot
    """
    check("ragged_dot", _ragged_dot_rules, (lhs, rhs, group_sizes))
    run = _ragged_dot_tpu if lhs.device.type == "tpu" else _ragged_dot_cpu
    return run(lhs, rhs, group_sizes)


def _ragged_dot_transposed_signature(lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> Tensor: ...


_ragged_dot_transposed_rules = (
    Rule("lhs", ("m", "k")),
    Rule("rhs", ("g", "n", "k")),
    Rule("group_sizes", ("g",), "int"),
)
_ragged_dot_transposed_results = (Rule("lhs", ("m", "n")),)
_ragged_dot_transposed_tpu, _ragged_dot_transposed_cpu = _declare(
    "ragged_dot_transposed",
    _ragged_dot_transposed_signature,
    _ragged_dot_transposed_rules,
    _ragged_dot_transposed_results,
    tpu=("mosaic", "xla"),
    cpu=("xla",),
)


def ragged_dot_transposed(lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> Tensor:
    """The same for weights stored the other way round, as Transformers stores those of experts.

    Shapes   lhs (m, k), rhs (g, n, k), group_sizes (g,)  ->  (m, n)
    Dtypes   lhs, rhs: float32, bfloat16, float16; group_sizes: int32, int64
    Grads    of every float tensor, first order
    Raises   ValueError: shapes that do not match.  TypeError: a dtype outside the list.  ImportError: no tokamax
    Runs     on TPU mosaic or else xla, on CPU xla
    Source   tokamax.ragged_dot_general
    """
    check("ragged_dot_transposed", _ragged_dot_transposed_rules, (lhs, rhs, group_sizes))
    run = _ragged_dot_transposed_tpu if lhs.device.type == "tpu" else _ragged_dot_transposed_cpu
    return run(lhs, rhs, group_sizes)
