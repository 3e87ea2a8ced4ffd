"""Peers of moe-experts that only tokamax 0.0.17 and newer has (Python 3.12 on), as whole experts layers on one chip.

    tokamax-gmm        gather, gmm_v2, gate, gmm_v2, sum: the grouped product under its ragged_dot on a TPU
    tokamax-routing    routing_moe: gather and scatter inside its grouped products
    tokamax-fused      fused_moe: one kernel, which sends tokens to experts within it. It takes the router's logits, so
                       softmax and top-k are in it, which no other row has
    tokamax-decode     fused_moe_decode: one kernel for few tokens, TPU7x on. It always has a shared expert too; here of
                       128 columns, the least it takes

Weights lie as each wants them, (e, h, 2 * i) and (e, i, h), not as Transformers stores them, free of charge.
All of them start their copies themselves, which can't be counted, so they have bundles, spills and VMEM but no time.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

PEERS = ("tokamax-gmm", "tokamax-routing", "tokamax-fused", "tokamax-decode")
NAMES = {
    "tokamax-gmm": "tokamax gmm_v2",
    "tokamax-routing": "tokamax routing_moe",
    "tokamax-fused": "tokamax fused_moe",
    "tokamax-decode": "tokamax fused_moe_decode",
}
_OPS = "tokamax._src.ops"
SHARED = 128
MEND = "try `pip install tokamax==0.0.17 jax==0.12.0.1 libtpu==0.0.52`, in an environment that need not have torch."


def installed() -> bool:
    """Whether this tokamax has them."""
    try:
        return tuple(map(int, importlib.metadata.version("tokamax").split(".")[:3])) >= (0, 0, 17)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def takes(case: Any) -> bool:
    """Whether they compute that layer: no biases, silu, gate and up side by side, weights not quantised."""
    plain = not case.bias and case.gate == "concatenated" and case.activation == "silu" and case.limit is None
    return plain and not getattr(case, "quantized", "")


def build(impl: str, case: Any, index: Any) -> tuple[Callable, tuple[Any, ...]]:
    """The layer and its arguments."""
    import jax
    import jax.numpy as jnp

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = array(case.t, case.h), array(case.e, case.h, case.w), array(case.e, case.i, case.h)
    weights = array(case.t, case.top_k, dtype=jnp.float32)
    if impl == "tokamax-fused":
        return _fused(case), (*layer, array(case.t, case.e, dtype=jnp.float32))
    if impl == "tokamax-decode":
        scales = (array(case.e, 1, 1, case.w, dtype=jnp.float32), array(case.e, 1, 1, case.h, dtype=jnp.float32))
        shared = (
            array(case.h, 2 * SHARED),
            array(1, 2 * SHARED, dtype=jnp.float32),
            array(SHARED, case.h),
            array(1, case.h, dtype=jnp.float32),
        )
        return _decode, (*layer, *scales, *shared, weights, index)
    return (_routing if impl == "tokamax-routing" else _grouped), (*layer, index, weights)


def _grouped(x: Any, gate_up: Any, down: Any, index: Any, weights: Any) -> Any:
    import jax
    import jax.numpy as jnp

    gmm = importlib.import_module(f"{_OPS}.gmm_v2.gmm_v2").gmm_v2
    order, sizes = _sorted(index, gate_up.shape[0])
    with _number_of_cores():
        product = gmm(x[order // index.shape[1]], gate_up, sizes).astype(jnp.float32)
        gates, ups = jnp.split(product, 2, axis=-1)
        y = gmm((jax.nn.silu(gates) * ups).astype(x.dtype), down, sizes)
    rows = y[jnp.argsort(order)].reshape(*index.shape, x.shape[1])
    return jnp.sum(rows * weights[..., None], axis=1).astype(x.dtype)


def _routing(x: Any, gate_up: Any, down: Any, index: Any, weights: Any) -> Any:
    """What routing_moe does after its top-k, on one chip."""
    import jax.numpy as jnp

    home = f"{_OPS}.experimental.routing_moe"
    arg, gmm = (importlib.import_module(f"{home}.{name}") for name in ("common.arg", "gmm.kernel"))
    pack, reduce = (importlib.import_module(f"{home}.io_relayout.{name}") for name in ("input_pack", "output_reduce"))
    order, sizes = _sorted(index, gate_up.shape[0])
    first = jnp.zeros(1, jnp.int32)
    gated = gmm.routing_gmm(
        x=pack.input_pack(x),
        w=arg.make_weight_wrapper(gate_up, None, None, fused_gate_up=True),
        group_sizes=sizes,
        gather=arg.make_routing_wrapper(order // index.shape[1]),
        fuse_act="silu",
        group_offset=first,
    )
    y = gmm.routing_gmm(
        x=gated,
        w=arg.make_weight_wrapper(down, None, None),
        group_sizes=sizes,
        scatter=arg.make_routing_wrapper(order),
        group_offset=first,
    )
    return reduce.output_reduce_unpack(y, weights, index, first, gate_up.shape[0])


def _fused(case: Any) -> Callable:
    def run(x: Any, gate_up: Any, down: Any, logits: Any) -> Any:
        import jax
        import numpy as np

        layer = importlib.import_module(f"{_OPS}.experimental.fused_moe.layer")
        host = importlib.import_module(f"{_OPS}.experimental.fused_moe.host")
        device = jax.config.jax_default_device  # pyrefly: ignore (made at run time)
        mesh = jax.sharding.Mesh(np.array([device]), ("d",))
        return layer.fused_ep_moe_v2(
            x=x,
            w1=gate_up,
            w2=down,
            w1_scale=None,
            w2_scale=None,
            gating=logits,
            w1_bias=None,
            w2_bias=None,
            topk=case.top_k,
            renormalize=True,
            mesh=mesh,
            weight_format=host.weight_format_of_dtype(gate_up.dtype),
            act_fn="silu",
            capacity=128,  # its default
        )

    return run


def _decode(x: Any, gate_up: Any, down: Any, *rest: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    *scales_and_shared, weights, index = rest
    kernel = importlib.import_module(f"{_OPS}.experimental.fused_moe_decode.fused_moe_decode_kernel")
    device = jax.config.jax_default_device  # pyrefly: ignore (made at run time)
    mesh = jax.sharding.Mesh(np.array([device]), ("d",))

    def run(*args: Any) -> Any:
        return kernel.fused_moe_decode(jnp.zeros(1, jnp.int32), *args[:-2], None, *args[-2:], n_ranks=1)

    everywhere = jax.sharding.PartitionSpec()
    arguments = (x, gate_up, down, *scales_and_shared, weights, index)
    specs = (everywhere,) * len(arguments)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False)(*arguments)


def _number_of_cores() -> Any:
    """gmm_v2 asks for it, and the compiler's stand-in for a device does not say."""
    import jax

    kind = jax.config.jax_default_device.device_kind  # pyrefly: ignore (made at run time)
    device = jax.sharding.AbstractDevice(kind, 2 if kind == "TPU v5" else 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _sorted(index: Any, experts: int) -> tuple[Any, Any]:
    """The slots in the order of their experts, and how many each expert got."""
    import jax.numpy as jnp

    flat = index.reshape(-1)
    return jnp.argsort(flat), jnp.bincount(flat, length=experts).astype(jnp.int32)
