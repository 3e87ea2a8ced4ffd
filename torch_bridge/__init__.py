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

What does not cross: float64, complex128 and uint64 are refused, since JAX has no 64-bit types by default
and a library must not switch them on for the process. int64 crosses as int32. On CPU its values are looked
at first; on TPU, where a look would wait for the device, they are not: check such an input before.
Attributes (float, int, bool, str) are part of the compiled program: a new value is a new trace.
"""

from .lazy import Lazy
from .op import JaxOp, jax_op
from .paths import record_paths, use_path

__all__ = ["JaxOp", "Lazy", "jax_op", "record_paths", "use_path"]
