"""JAX function -> torch op.

    import jax
    import torch
    from pallas_hub.torch_bridge import jax_op

    def gelu(x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x)

    def gelu_vjp(x, grad):
        return jax.vjp(gelu, x)[1](grad)

    op = jax_op("gelu", namespace="example", fn=gelu, vjp=gelu_vjp)
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    op(x).sum().backward()
    print(x.grad)  # tensor([-0.0830,  0.1326,  0.5000,  0.8674,  1.0830])

`op` is torch.ops.example.gelu, schema and output shapes are read off the JAX function, and torch.compile,
torch.export, vmap and autograd treat it like any other op.

Read on in this order: `op` declares and calls; `paths` chooses what runs on which device; `cpu` and
`exchange` run JAX on CPU tensors; `tpu` goes through torch_tpu; `shapes` and `symbols` answer the compiler.
`tuning` stands apart: it finds tuned block sizes for the kernels, and needs neither torch nor JAX.

What does not cross: float64, complex128 and uint64 are refused, since JAX has no 64-bit types by default
and a library must not switch them on for the process. int64 crosses as int32. On CPU its values are looked
at first; on TPU, where a look would wait for the device, they are not: check such an input before.
Attributes (float, int, bool, str) are part of the compiled program: a new value is a new trace.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lazy import Lazy
    from .op import JaxOp, jax_op
    from .paths import record_paths, use_path

__all__ = ["JaxOp", "Lazy", "jax_op", "record_paths", "use_path"]

_HOME = {"JaxOp": "op", "Lazy": "lazy", "jax_op": "op", "record_paths": "paths", "use_path": "paths"}


def __getattr__(name: str) -> Any:
    """Imported on first use: `tuning` is for kernels' JAX code, which runs where there is no torch."""
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
