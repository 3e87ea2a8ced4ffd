"""JAX function -> torch op.

    import jax, jax.numpy as jnp, torch
    from pallas_hub.torch_bridge import jax_op

    def gelu(x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x)

    def gelu_vjp(x, grad):
        return jax.vjp(jax.nn.gelu, x)[1](grad)

    op = jax_op("gelu", namespace="example", fn=gelu, vjp=gelu_vjp)
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    op(x).sum().backward()
    print(x.grad)  # tensor([-0.0833,  0.1325,  0.5000,  0.8675,  1.0833])
"""

from .lazy import Lazy
from .op import JaxOp, jax_op
from .paths import record_paths, use_path

__all__ = ["JaxOp", "Lazy", "jax_op", "record_paths", "use_path"]
