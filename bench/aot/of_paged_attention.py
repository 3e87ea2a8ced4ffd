"""Programs of paged attention: one query for each of many sequences, whose keys and values lie in pages.

    decode      q (s, hq, d), pages (n, page, hk, d), contexts of all lengths (seed 0), page tables in random order

The peer is jax's ragged paged attention (jax.experimental.pallas.ops.tpu), whose pages hold keys and values of the same
token side by side; tables and lengths are the same. bfloat16 throughout.

Both kernels copy pages by themselves, which a report can't see. The bytes of ours are counted from a program whose
blocks are the pages of the kernel's own table of visits. Those of the peer stay unknown: it copies whole blocks, the
first page of the table in place of one past the context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.programs import Program, Workload
from pallas_hub.bench.aot.shapes import is_shape, parse_shape
from pallas_hub.bench.kernel_source import load_jax_module

OPS = ("decode",)
PEERS = ("jax-paged",)
ITEM = 2  # bytes of a bfloat16
_EXAMPLE = {"s": 64, "c": 4096, "hq": 32, "hk": 4, "d": 128, "page": 128}
_PEER_VMEM_BYTES = 96 << 20
_PEER_QUERIES = (8, 32)  # 32 is the peer's default


def cases() -> list[Workload]:
    return [Workload(op, case.name) for case in _kernel("paged_cases").MODEL_CASES for op in OPS]


def build(op: str, case_name: str, impl: str, blocks: dict[str, int] | None) -> Program:
    """`blocks` are the fields of our config; of the peer pages and queries per block."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    case = find_case(case_name)
    lengths, table = np.array(case.lengths(), np.int32), np.array(case.page_table(), np.int32)
    q_starts = np.arange(case.s + 1, dtype=np.int32)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    q, scale = array(case.s, case.hq, case.d), case.d**-0.5
    least = 2 * int(lengths.sum()) * case.hk * case.d + 2 * case.s * case.hq * case.d
    flops = 4 * int(lengths.sum()) * case.hq * case.d
    note = f"contexts are random (seed 0): {lengths.sum()} keys of up to {case.s * case.context}"
    if impl == "ours":
        rows = array(case.num_pages, case.page * case.hk, case.d)
        args = (q, rows, rows, lengths, table, q_starts)
        config = None if blocks is None else _kernel("paged_config").PagedConfig(**blocks)
        fn = functools.partial(_ours, case.hk, scale, config)
        counted_as = (functools.partial(_pages_as_blocks, case, blocks or own_blocks(op, case_name, "v6e")), args)
        return Program(fn, args, least * ITEM, flops, {}, counted_as, note, "bytes counted from the table of visits")
    pages = array(case.num_pages, case.page, 2 * case.hk, case.d)
    args = (q, pages, lengths, table, q_starts, np.array([case.s], np.int32))
    return Program(
        functools.partial(_peer, scale, blocks or peer_blocks(op, case_name, "v6e", impl)[0]),
        args,
        least * ITEM,
        flops,
        {},
        None,
        note,
    )


def own_blocks(op: str, case_name: str, target: str) -> dict[str, int]:
    """What the kernel chooses by itself on that TPU."""
    case, config = find_case(case_name), _kernel("paged_config")
    return vars(config.choose_paged(_sizes(case), 1, case.most_pages, HARDWARE[target].device_kind)).copy()


def peer_blocks(op: str, case_name: str, target: str, impl: str) -> list[dict[str, int]]:
    """Our pages per visit, then what the peer's own table of tuned blocks says, and its default."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as peer

    case = find_case(case_name)
    ours = own_blocks(op, case_name, target)["block_pages"]
    found = [{"block_pages": ours, "block_queries": queries} for queries in _PEER_QUERIES]
    device = " ".join(HARDWARE[target].device_kind.split()[:2])
    key = peer.simplify_key(
        ("bfloat16", "bfloat16", case.hq, case.hk, case.d, case.page, case.s, case.most_pages),
    )
    tuned = peer.TUNED_BLOCK_SIZES.get(device, {}).get(key)
    if tuned is not None:
        pages, queries = min(tuned[0], case.most_pages), min(tuned[1], case.s)
        found.append({"block_pages": pages, "block_queries": queries})
    return list({tuple(blocks.items()): blocks for blocks in found}.values())


def find_case(name: str) -> Any:
    """The case of that name, or of that shape.

    Raises   ValueError: there is none.
    """
    if is_shape(name):
        return shape_case(name)
    cases = _kernel("paged_cases").MODEL_CASES
    found = next((case for case in cases if case.name == name), None)
    if found is None:
        there_are = ", ".join(case.name for case in cases)
        raise ValueError(f"paged-attention has no workload {name!r}; there are: {there_are}.")
    return found


def shape_case(text: str) -> Any:
    """A case of the user's own. Raises   ValueError: not in the letters of this kernel."""
    shape, _ = parse_shape("paged-attention", text, _EXAMPLE)
    if shape["hq"] % shape["hk"]:
        raise ValueError(
            f"paged-attention: --shape needs hq to be a multiple of hk = {shape['hk']}; got {shape['hq']}."
        )
    if shape["s"] * shape["c"] > 1 << 24:
        raise ValueError(f"paged-attention: --shape takes s * c up to {1 << 24}; got {shape['s'] * shape['c']}.")
    sizes = (shape[letter] for letter in _EXAMPLE)
    return _kernel("paged_cases").PagedCase(*sizes, name=text)


def _kernel(module: str) -> Any:
    return load_jax_module("flash-attention", module)


def _sizes(case: Any) -> Any:
    return _kernel("paged_config").PagedSizes(case.hq, case.hk, case.d, case.d, case.page, ITEM)


def _ours(hk: int, scale: float, config: Any, *arrays: Any) -> Any:
    # Of pages as rows: cut out of a program, the reshape that makes them would count as a copy, which it is not.
    attend = _kernel("paged").paged_attention_of_rows
    return attend(*arrays, None, scale, True, -1, 0.0, hk=hk, config=config)


def _peer(scale: float, blocks: dict[str, int], *arrays: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention(
        *arrays,
        sm_scale=scale,
        num_kv_pages_per_block=blocks["block_pages"],
        num_queries_per_block=blocks["block_queries"],
        vmem_limit_bytes=_PEER_VMEM_BYTES,
    )


def _pages_as_blocks(
    case: Any, blocks: dict[str, int], q: Any, k_rows: Any, v_rows: Any, lengths: Any, table: Any, q_starts: Any
) -> Any:
    """A program that copies, as blocks of its operands, the pages that our kernel copies by itself; it adds them up."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    visits, block_pages = _kernel("paged_visits"), blocks["block_pages"]
    tiles = visits.one_query_tiles(q_starts, lengths, case.s)
    walk = visits.visits_of_tiles(
        tiles, lengths, block_q=1, page_size=case.page, block_pages=block_pages, most_pages=case.most_pages,
        window=None, causal=True, whole=True,
    )  # fmt: skip
    first = walk.first_page[walk.tile] + walk.block * block_pages
    count = jnp.clip((walk.past_key[walk.tile] + case.page - 1) // case.page - first, 0, block_pages)
    place = jnp.arange(block_pages)
    number = tiles.sequence[walk.tile][:, None] * case.most_pages + first[:, None] + place
    pages = table.reshape(-1)[jnp.minimum(number, table.size - 1)]  # (visits, block_pages)
    # A place without a page keeps the one it had: what does not change is not copied.
    since = jnp.where(place < count[:, None], jnp.arange(pages.shape[0])[:, None], 0)
    kept = jax.lax.cummax(since, axis=0)
    pages = jnp.take_along_axis(pages, kept, axis=0).reshape(-1)

    def page_at(n: int) -> Callable:
        return lambda v, tile, pages: (pages[v * block_pages + n], 0, 0)

    def add(_tile: Any, _pages: Any, q_ref: Any, *refs: Any) -> None:
        *page_refs, out_ref = refs
        out_ref[...] = q_ref[...] + sum(ref[:1, :] for ref in page_refs)

    in_pages = [pl.BlockSpec((None, *k_rows.shape[1:]), page_at(n)) for n in range(block_pages)]
    of_tile = pl.BlockSpec((None, case.hq, case.d), lambda v, tile, pages: (tile[v], 0, 0))
    return pl.pallas_call(
        add,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(jnp.maximum(walk.count, 1),),
            in_specs=[of_tile, *in_pages, *in_pages],
            out_specs=of_tile,
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="paged_attention",
    )(walk.tile, pages, q, *[k_rows] * block_pages, *[v_rows] * block_pages)
