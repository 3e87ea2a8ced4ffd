"""Programs of ragged-dot: the product and its gradients, and the same from megablox (jax), tokamax and XLA.

    forward              (m, k) @ (g, k, n)
    forward-transposed   (m, k) @ (g, n, k) transposed: how Transformers stores experts
    backward-lhs         (m, n) @ (g, k, n) transposed
    backward-rhs         rows of (m, k) against rows of (m, n), per group

Rows are routed to groups by the sampled sizes of the case (seed 0). bfloat16 throughout.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.programs import Program, Workload
from pallas_hub.bench.aot.shapes import is_shape, parse_shape
from pallas_hub.bench.kernel_source import load_jax_module

OPS = ("forward", "forward-transposed", "backward-lhs", "backward-rhs")
PEERS = ("jax", "tokamax", "xla", "xla-kernel")
ITEM = 2  # bytes of a bfloat16
# Neither peer asks for VMEM itself, and the default limit is too small for their larger tiles.
PEER_VMEM: dict[str, str | bool] = {"xla_tpu_scoped_vmem_limit_kib": str(56 * 1024)}


def cases() -> list[Workload]:
    return [Workload(op, case.name) for case in load_jax_module("ragged-dot", "cases").MODEL_CASES for op in OPS]


def build(op: str, case_name: str, impl: str, blocks: dict[str, int] | None) -> Program:
    """One op on one case. `blocks` are fields of our Config; of a peer's tile (block_m, block_k, block_n) count."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    case = find_case(case_name)
    m, k, n, g = case.m, case.k, case.n, case.g

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    sizes = np.array(case.group_sizes, np.int32)
    left, right, transposed = {
        "forward": (array(m, k), array(g, k, n), False),
        "forward-transposed": (array(m, k), array(g, n, k), True),
        "backward-lhs": (array(m, n), array(g, k, n), True),
        "backward-rhs": (array(m, k), array(m, n), False),
    }[op]
    options: dict[str, str | bool] = {}
    counted_as = None
    if impl == "ours":
        fn = _ours(op, transposed, blocks)
    elif impl == "xla" or impl == "xla-kernel":
        fn = peer_product("xla", op, transposed)
        if impl == "xla-kernel":
            options["xla_tpu_enable_ragged_dot_kernel"] = True
    else:
        tile = _tile(op, case, blocks or {})
        fn, options = peer_product(impl, op, transposed, tile), PEER_VMEM.copy()
        if impl == "tokamax":  # its pipeline is written by hand; the copies are megablox's
            counted_as = (peer_product("jax", op, transposed, tile), (left, right, sizes))
    note = f"rows go to groups at random (seed 0): {_active(case)} of {g} have some" if is_shape(case_name) else ""
    return Program(fn, (left, right, sizes), _least_bytes(op, case), 2 * m * k * n, options, counted_as, note)


def own_blocks(op: str, case_name: str, target: str) -> dict[str, int]:
    """What the kernel chooses by itself on that TPU."""
    tuned, kind = load_jax_module("ragged-dot", "tuned"), HARDWARE[target].device_kind
    return vars(tuned.tuned_config(*_launch(op, case_name), "bfloat16", ITEM, kind)).copy()


def default_blocks(op: str, case_name: str, target: str) -> dict[str, int]:
    """The same without what was tuned."""
    tuned, kind = load_jax_module("ragged-dot", "tuned"), HARDWARE[target].device_kind
    return vars(tuned.default_config(*_launch(op, case_name), ITEM, kind)).copy()


def peer_blocks(op: str, case_name: str, target: str, impl: str) -> list[dict[str, int] | None]:
    """Tiles to try: ours first, then the inner axis whole and columns as wide as VMEM allows, with 128 and 256 rows."""
    if impl.startswith("xla"):
        return [None]
    case, own = find_case(case_name), own_blocks(op, case_name, target)
    k, n = _inner(op, case)
    tiles = [(min(own["block_m"], case.m), own["block_k"], own["block_n"])]
    # Peers need row tiles that divide m; m of a model case is a multiple of 8.
    for rows in [size for size in (128, 256) if case.m % size == 0] or [case.m]:
        widths = [columns for columns in (n, n // 2) if peer_vmem_bytes(rows, k, columns) < 40 << 20]
        tiles += [(rows, k, columns) for columns in widths[:1]]
    return [dict(zip(("block_m", "block_k", "block_n"), tile, strict=True)) for tile in dict.fromkeys(tiles)]


def peer_vmem_bytes(m: int, k: int, n: int) -> int:
    """Every block twice, and a float32 accumulator."""
    return 2 * (m * k + k * n + m * n) * ITEM + m * n * 4


def tune_blocks(op: str, case_name: str, target: str) -> list[dict[str, int]]:
    """Row tiles, column blocks and chunks around the default that fit VMEM by the kernel's own estimate."""
    case, config = find_case(case_name), load_jax_module("ragged-dot", "config")
    default = config.Config(**default_blocks(op, case_name, target))
    k, n = _inner(op, case)
    need = config.weight_gradient_vmem_bytes if op == "backward-rhs" else config.forward_vmem_bytes
    inner = {default.block_k, k} | ({512, 1024} if op == "backward-rhs" else set())
    found = []
    for block_m in sorted({default.block_m // 2, default.block_m, default.block_m * 2}):
        for block_k in sorted(size for size in inner if size <= k):
            for block_n in sorted({size for size in (default.block_n, n, n // 2, 512, 768) if size <= n}):
                for chunk in sorted({default.chunk, 128, 256, 512}):
                    candidate = config.Config(block_m, block_k, block_n, default.vmem_limit_bytes, chunk)
                    rows_fit = block_m % 16 == 0 and 16 <= block_m <= max(16, -(-case.m // 16) * 16)
                    columns_fit = block_n % 128 == 0 or block_n == n
                    if rows_fit and columns_fit and need(candidate, ITEM) * 5 <= candidate.vmem_limit_bytes * 4:
                        found.append(vars(candidate).copy())
    return found


def sizes(op: str, case_name: str) -> dict[str, Any]:
    """What a tuned entry is found by."""
    return load_jax_module("ragged-dot", "tuned").sizes(*_launch(op, case_name), "bfloat16")


def find_case(name: str) -> Any:
    """The case of that name, or of that shape.

    Raises   ValueError: there is none.
    """
    if is_shape(name):
        return shape_case(name)
    cases = load_jax_module("ragged-dot", "cases").MODEL_CASES
    found = next((case for case in cases if case.name == name), None)
    if found is None:
        raise ValueError(f"ragged-dot has no workload {name!r}; there are: {', '.join(case.name for case in cases)}.")
    return found


def shape_case(text: str) -> Any:
    """A case of the user's own. Raises   ValueError: not in the letters of this kernel."""
    shape, _ = parse_shape("ragged-dot", text, {"m": 512, "k": 2048, "n": 1536, "g": 128})
    case = load_jax_module("ragged-dot", "cases").Case
    return case(shape["m"], shape["k"], shape["n"], _routed(shape["m"], shape["g"]), text)


def tuned_workload(when: dict[str, Any]) -> Workload:
    """The workload that such an entry was made for, with rows routed at random."""
    op = "backward-rhs" if when["op"] == "weight-gradient" else when["op"]
    return Workload(op, ",".join(f"{letter}={when[letter]}" for letter in "mkng"))


@functools.cache
def _routed(m: int, g: int) -> tuple[int, ...]:
    """Each row to one group, all equally likely."""
    return load_jax_module("ragged-dot", "cases").routed_sizes(m, g, top_k=1)


def _launch(op: str, case_name: str) -> tuple[str, int, int, int, int]:
    """The kernel's own name of the op, and its m, k, n, g."""
    case = find_case(case_name)
    name = {"forward": "forward", "backward-rhs": "weight-gradient"}.get(op, "forward-transposed")
    return name, case.m, *_inner(op, case), case.g


def _inner(op: str, case: Any) -> tuple[int, int]:
    """The contracted and the produced width."""
    return (case.n, case.k) if op == "backward-lhs" else (case.k, case.n)


def _least_bytes(op: str, case: Any) -> int:
    """Both row arrays once, and once the weights of each group with rows (their gradients: of every group)."""
    active = case.g if op == "backward-rhs" else _active(case)
    return (case.m * (case.k + case.n) + active * case.k * case.n) * ITEM


def _active(case: Any) -> int:
    return sum(size > 0 for size in case.group_sizes)


def _ours(op: str, transposed: bool, blocks: dict[str, int] | None) -> Callable:
    kernel = load_jax_module("ragged-dot", "kernel")
    config = load_jax_module("ragged-dot", "config").Config(**blocks) if blocks else None
    if op == "backward-rhs":
        return functools.partial(kernel.ragged_dot_weight_gradient, config=config)
    return functools.partial(kernel.ragged_dot_forward, transpose_rhs=transposed, config=config)


def _tile(op: str, case: Any, blocks: dict[str, int]) -> tuple[int, int, int]:
    k, n = _inner(op, case)
    rows = min(blocks.get("block_m", 128), case.m)
    return rows, min(blocks.get("block_k", 128), k), min(blocks.get("block_n", 128), n)


def peer_product(impl: str, op: str, transposed: bool, tile: tuple[int, int, int] = (128, 128, 128)) -> Callable:
    """One of OPS as (left, right, sizes) -> array, by megablox (jax), tokamax or, without a tile, xla."""
    if impl == "xla":
        return _xla(op, transposed)
    return (_megablox if impl == "jax" else _tokamax)(op, transposed, tile)


def _megablox(op: str, transposed: bool, tile: tuple[int, int, int]) -> Callable:
    def run(left: Any, right: Any, sizes: Any) -> Any:
        megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
        options = {"preferred_element_type": left.dtype, "tiling": tile}
        if op == "backward-rhs":
            return megablox.tgmm(left.T, right, sizes, **options)
        return megablox.gmm(left, right, sizes, transpose_rhs=transposed, **options)

    return run


def _tokamax(op: str, transposed: bool, tile: tuple[int, int, int]) -> Callable:
    def run(left: Any, right: Any, sizes: Any) -> Any:
        import jax

        # The kernel under tokamax.ragged_dot, which chooses tiles by itself.
        tokamax = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel")
        options = {"precision": jax.lax.Precision.DEFAULT, "out_dtype": left.dtype, "tiling": tile}
        if op == "backward-rhs":
            return tokamax.tgmm(left.T, right, sizes, **options)
        return tokamax.gmm(left, right, sizes, transpose_rhs=transposed, **options)

    return run


def _xla(op: str, transposed: bool) -> Callable:
    import jax

    def product(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(lhs, rhs.swapaxes(1, 2) if transposed else rhs, sizes)

    def weight_gradient(lhs: Any, grad: Any, sizes: Any) -> Any:
        rhs = jax.ShapeDtypeStruct((sizes.shape[0], lhs.shape[1], grad.shape[1]), lhs.dtype)
        return jax.linear_transpose(lambda rhs: jax.lax.ragged_dot(lhs, rhs, sizes), rhs)(grad)[0]

    return weight_gradient if op == "backward-rhs" else product
