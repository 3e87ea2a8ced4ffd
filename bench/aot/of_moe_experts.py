"""Programs of moe-experts: a whole experts layer, and the same layer put together from peers' products.

    forward     (t, h) through top_k of e experts; weights as the model of the case stores them

The peers' layers sort the slots, gather rows, multiply by a ragged dot of megablox (jax) or tokamax, gate, multiply
again, bring the rows back and sum them, as one jitted program. "lax" takes jax.lax.ragged_dot; "batched_mm" a copy of
its expert's weights for every slot, as Transformers does by that name; "products" is this project's own composition.
Tokens are routed by the case's sample (seed 0). bfloat16 throughout, but for quantised weights; in their place peers
read bfloat16.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from pallas_hub.bench.aot import moe_peers
from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.of_ragged_dot import PEER_VMEM, peer_product, peer_vmem_bytes
from pallas_hub.bench.aot.programs import Program, Workload
from pallas_hub.bench.aot.shapes import is_shape, parse_shape
from pallas_hub.bench.kernel_source import load_jax_module

OPS = ("forward",)
PEERS = ("products", "jax", "tokamax", "lax", "batched_mm", *moe_peers.PEERS)
ITEM = 2  # bytes of a bfloat16
_EXAMPLE = {"t": 64, "h": 2048, "i": 768, "e": 128, "k": 8}


def cases() -> list[Workload]:
    return [Workload(op, case.name) for case in _listed() for op in OPS]


def _listed() -> list[Any]:
    cases = load_jax_module("moe-experts", "cases")
    return [*cases.MODEL_CASES, *cases.QUANTIZED_CASES]


def build(op: str, case_name: str, impl: str, blocks: dict[str, int] | None) -> Program:
    """`blocks` are fields of our configs; of a peer's tiles rows, and columns of the first and the second product."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    case = find_case(case_name)
    index = np.array(case.index(), np.int32)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    biases = (array(case.e, case.w), array(case.e, case.h)) if case.bias else (None, None)
    weights, scales = _weights(case, array, quantized=impl in ("ours", "products"))
    args = (
        array(case.t, case.h),
        *weights,
        index,
        array(case.t, case.top_k, dtype=jnp.float32),
        *biases,
        *scales,
    )
    in_use = len({expert for row in index.tolist() for expert in row} - {case.e})
    of_expert = sum(part.dtype.itemsize * part.size // case.e for part in (*weights, *scales))
    least = in_use * of_expert + 2 * case.t * case.h * ITEM
    served = int((index < case.e).sum())
    flops = 2 * served * case.h * (case.w + case.i)
    counted_as = None
    options: dict[str, str | bool] = {}
    if impl == "ours":
        fn = _ours(case, blocks)
    elif impl == "products":
        fn = _ours(case, {})
    elif impl == "batched_mm":
        fn = functools.partial(_batched, case)
    elif impl in moe_peers.PEERS:
        fn, args = moe_peers.build(impl, case, index)
    elif impl == "lax":
        fn = functools.partial(_composed, case, "xla", {})
    else:
        fn, options = functools.partial(_composed, case, impl, blocks or {}), PEER_VMEM.copy()
        if impl == "tokamax":  # its pipeline is written by hand; the copies are megablox's
            counted_as = (functools.partial(_composed, case, "jax", blocks or {}), args)
    note = f"tokens choose experts at random (seed 0): {in_use} of {case.e} are in use" if is_shape(case_name) else ""
    return Program(fn, args, least, flops, options, counted_as, note)


def _weights(case: Any, array: Callable, quantized: bool) -> tuple[list[Any], list[Any]]:
    """gate_up and down, and their scales if they are quantised."""
    import jax.numpy as jnp

    if not (case.quantized and quantized):
        return [array(*shape) for shape in case.weight_shapes], []
    dtypes = {kind: dtype for dtype, kind in load_jax_module("moe-experts", "stored").KINDS.items()}
    weights, scales = [], []
    for stored, (e, rows, columns) in zip(case.stored, case.weight_shapes, strict=True):
        weights.append(array(e, stored.data_rows(rows), columns, dtype=jnp.dtype(dtypes[stored.kind])))
        scales.append(array(e, *stored.scale_shape(rows, columns), dtype=jnp.float32))
    return weights, scales


def own_blocks(op: str, case_name: str, target: str) -> dict[str, int]:
    """What the kernel chooses by itself on that TPU; empty where it takes two ragged dots."""
    case, config = find_case(case_name), load_jax_module("moe-experts", "config")
    sizes = config.Sizes(case.t, case.h, case.w, case.i, case.e, case.top_k, case.transposed, case.stored)
    return vars(config.choose(sizes, ITEM, HARDWARE[target].device_kind)).copy()


def peer_blocks(op: str, case_name: str, target: str, impl: str) -> list[dict[str, int] | None]:
    """The inner axis whole, 128 or 256 rows where they divide the slots, columns as wide as VMEM allows."""
    case = find_case(case_name)
    if impl in moe_peers.PEERS and not moe_peers.takes(case):
        return []
    if impl not in ("jax", "tokamax"):
        return [None]
    slots = case.t * case.top_k

    def widths(rows: int, k: int, n: int) -> list[int]:
        return [
            columns for columns in (n, n // 2) if peer_vmem_bytes(rows, k, columns) < 40 << 20 and columns % 128 == 0
        ]

    tiles = [
        {"rows": rows, "first": first, "second": second}
        for rows in ([size for size in (128, 256) if slots % size == 0] or [slots])
        for first, second in itertools.product(
            widths(rows, case.h, case.w)[:1] or [128], widths(rows, case.i, case.h)[:1] or [128]
        )
    ]
    return list(tiles)


def find_case(name: str) -> Any:
    """The case of that name, or of that shape.

    Raises   ValueError: there is none.
    """
    if is_shape(name):
        return shape_case(name)
    cases = _listed()
    found = next((case for case in cases if case.name == name), None)
    if found is None:
        raise ValueError(f"moe-experts has no workload {name!r}; there are: {', '.join(case.name for case in cases)}.")
    return found


def shape_case(text: str) -> Any:
    """A case of the user's own. Raises   ValueError: not in the letters of this kernel."""
    formats = list(load_jax_module("moe-experts", "stored").FORMATS)
    shape, flags = parse_shape("moe-experts", text, _EXAMPLE, formats)
    if len(flags) > 1:
        raise ValueError(f"moe-experts: --shape takes one of {', '.join(formats)}; got {', '.join(sorted(flags))}.")
    if shape["k"] > shape["e"]:
        raise ValueError(f"moe-experts: --shape needs k at most e = {shape['e']}, the experts; got k={shape['k']}.")
    case, quantized = load_jax_module("moe-experts", "cases").Case, "".join(flags)
    options = {"transposed": bool(quantized), "quantized": quantized, "name": text}
    return case(shape["t"], shape["h"], shape["i"], shape["e"], shape["k"], **options)


def _ours(case: Any, blocks: dict[str, int] | None) -> Callable:
    kernel, config = load_jax_module("moe-experts", "kernel"), load_jax_module("moe-experts", "config")
    options: dict[str, Any] = {"activation": case.activation, "gate": case.gate, "limit": case.limit}
    options["transposed"] = case.transposed
    if blocks is not None:
        kind = config.PrefillConfig if "tokens" in blocks else config.DecodeConfig if blocks else config.ProductsConfig
        options["config"] = kind(**blocks)
    return functools.partial(kernel.moe_experts_forward, **options)


def _composed(
    case: Any, impl: str, tiles: dict[str, int], x: Any, gate_up: Any, down: Any, index: Any, weights: Any, *biases: Any
) -> Any:
    import jax.numpy as jnp

    flat = index.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=case.e).astype(jnp.int32)
    experts = jnp.minimum(flat[order], case.e - 1)

    def linear(rows: Any, weight: Any, bias: Any, columns: str) -> Any:
        tile = [(tiles["rows"], rows.shape[1], tiles[columns])] if tiles else []  # XLA takes none
        out = peer_product(impl, "forward", not case.transposed, *tile)(rows, weight, sizes)
        return out if bias is None else out + bias[experts]

    gating = load_jax_module("moe-experts", "gates").Gating(case.activation, case.gate, case.limit)
    gated = gating.of(linear(x[order // case.top_k], gate_up, biases[0], "first").astype(jnp.float32)).astype(x.dtype)
    y = linear(gated, down, biases[1], "second")
    y = jnp.where((flat[order] < case.e)[:, None], y, 0)
    rows = y[jnp.argsort(order)].reshape(case.t, case.top_k, case.h)
    return jnp.sum(rows * weights[..., None], axis=1).astype(x.dtype)


def _batched(case: Any, x: Any, gate_up: Any, down: Any, index: Any, weights: Any, *biases: Any) -> Any:
    import jax.numpy as jnp

    flat = jnp.minimum(index.reshape(-1), case.e - 1)
    rows = jnp.repeat(x, case.top_k, axis=0)

    def linear(rows: Any, weight: Any, bias: Any) -> Any:
        out = jnp.einsum("sk,skn->sn" if case.transposed else "sk,snk->sn", rows, weight[flat])
        return out if bias is None else out + bias[flat]

    gating = load_jax_module("moe-experts", "gates").Gating(case.activation, case.gate, case.limit)
    gated = gating.of(linear(rows, gate_up, biases[0]).astype(jnp.float32)).astype(x.dtype)
    y = linear(gated, down, biases[1]).reshape(case.t, case.top_k, case.h)
    weights = jnp.where(index < case.e, weights, 0)
    return jnp.sum(y * weights[..., None], axis=1).astype(x.dtype)
