"""Attention over keys and values in pages: decode, prefill in parts, or both in one call.

    out[i] = softmax(q[i] . keys that i sees * scale) . their values

Each sequence has a context of keys, spread over the pages that its row of the page table lists in order. Its last query
stands at its last key, those before it one key earlier each. A query sees the keys up to its own position (causal), or
all, and with a window not those further back than that.

The pages are read as they lie in memory, (page_size, hk, d): one key of each head after the other, and no copy of them
is made outside. Parting the heads would cost more than all else in decode: in bfloat16 two rows share their words. So
there a product takes a set of heads: the two in a word (all of them where d is not 128). Their queries meet keys of
both heads, and scores with the other head's keys are masked. That doubles the exponentials, which are few, and costs
nothing else: a matrix unit has to take in every key once, however many queries pass by. For tiles of many queries the
two are taken apart.

Shapes   q (total_q, hq, d), k_pages (num_pages, page_size, hk, d), v_pages (num_pages, page_size, hk, dv),
         lengths (s,), page_table (s, most_pages), q_starts (s + 1,), sinks (hq,) -> (total_q, hq, dv)
Dtypes   float32 (multiplied in full precision) and bfloat16; scores, softmax and sums in float32
Grid     (visits,): a tile of queries over a block of pages (paged_visits.py). A visit waits for its own copies and
         starts those of the next but one, of that very sequence or another
Edge     a sequence's last block holds fewer pages: only these are copied. What lies in the rest of the block, and past
         the context in the last page (NaN too), is dropped. A NaN value reaches both heads of a set
Memory   3 * a block of pages of keys and values + a tile's queries, scores, sums and result: paged_config.py
Limits   decode is bound by reading the pages, each once
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ._bridge.tuning import device_kind
from .paged_block import LOG2E, SLOTS, Rule, visit_block
from .paged_config import LANES, SCALAR_BYTES, PagedConfig, PagedSizes, choose_block_q, choose_paged
from .paged_visits import (
    Tiles,
    last_query_tiles,
    many_query_tiles,
    one_query_tiles,
    sequence_of_tokens,
    visits_of_tiles,
)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    q_starts: jax.Array,
    sinks: jax.Array | None = None,
    scale: float = 1.0,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    *,
    config: PagedConfig | None = None,
    interpret=False,
) -> jax.Array:
    """See above; window -1: none. Arguments were checked in paged_op.py.

    config   blocks of the tiles with several queries, or of all where there are no more queries than sequences

    Raises   ValueError: pages that the kernel can't take (paged_config.py), tables too long for scalar memory
    """
    return paged_attention_of_rows(
        q, _rows_of(k_pages), _rows_of(v_pages), lengths, page_table, q_starts, sinks, scale, causal, window, softcap,
        hk=k_pages.shape[2], config=config, interpret=interpret,
    )  # fmt: skip


def paged_attention_of_rows(
    q, k_rows, v_rows, lengths, page_table, q_starts, sinks, scale, causal, window, softcap, *, hk: int,
    config: PagedConfig | None = None, interpret=False,
):  # fmt: skip
    """The same of pages as they lie in memory, (num_pages, page_size * hk, d)."""
    (total_q, hq, d), (num_pages, page_rows, dv) = q.shape, v_rows.shape
    s, most_pages = page_table.shape
    if 0 in (total_q, hq, d, dv, s, num_pages, page_rows, most_pages):  # nothing to compute, or nothing to see
        return jnp.zeros((total_q, hq, dv), q.dtype)
    page_size = page_rows // hk
    sizes = PagedSizes(hq, hk, d, dv, page_size, q.dtype.itemsize)
    rule = Rule(scale, softcap, None if window < 0 else window, causal)
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, most_pages * page_size)
    q_starts = q_starts.astype(jnp.int32)
    pages = jnp.clip(page_table.astype(jnp.int32), 0, num_pages - 1)
    run = functools.partial(
        _attend, k_rows=k_rows, v_rows=v_rows, lengths=lengths, pages=pages, sinks=sinks, rule=rule,
        interpret=interpret,
    )  # fmt: skip
    kind, apart = device_kind(), replace(sizes, apart=True)
    block_q = config.block_q if config else choose_block_q(apart, total_q, s)
    many = config or choose_paged(sizes if block_q == 1 else apart, block_q, most_pages, kind)
    if block_q == 1:
        return run(q, one_query_tiles(q_starts, lengths, total_q), sizes=sizes, config=many, whole=True)
    one = choose_paged(sizes, 1, most_pages, kind)
    singles = run(q, last_query_tiles(q_starts, lengths, total_q), sizes=sizes, config=one, whole=False)
    others = run(q, many_query_tiles(q_starts, lengths, total_q, block_q), sizes=apart, config=many, whole=False)
    owner = sequence_of_tokens(q_starts, total_q)
    here = jnp.minimum(owner, s - 1)
    single = q_starts[here + 1] - q_starts[here] == 1
    out = jnp.where(single[:, None, None], singles, others)
    return jnp.where((owner < s)[:, None, None], out, 0)


def _attend(
    q, tiles: Tiles, *, k_rows, v_rows, lengths, pages, sinks, sizes: PagedSizes, rule: Rule, config: PagedConfig,
    whole: bool, interpret,
):  # fmt: skip
    """(total_q, hq, d) -> (total_q, hq, dv), of tokens whose tile is visited."""
    block_q, block_pages, most_pages = config.block_q, config.block_pages, pages.shape[1]
    visits = visits_of_tiles(
        tiles, lengths, block_q=block_q, page_size=sizes.page_size, block_pages=block_pages, most_pages=most_pages,
        window=rule.window, causal=rule.causal, whole=whole,
    )  # fmt: skip
    tables = (*visits[:4], tiles.position, tiles.sequence, jnp.pad(pages.reshape(-1), (0, block_pages)))
    _check_tables(tables, sizes.page_size)
    queries = _to_tiles(q, tiles, sizes, block_q)  # (tiles, sets, rows, d)
    n, sets, rows, _ = queries.shape
    blocks = [pl.BlockSpec((None, sets, rows, width), _tile_of_visit) for width in (sizes.d, sizes.dv)]
    extra = [] if sinks is None else [_to_rows(sinks, sizes, block_q, rows)]
    whole_extra = [pl.BlockSpec(x.shape, lambda v, *_: (0, 0, 0)) for x in extra]
    body = functools.partial(
        visit_block, sizes=sizes, rule=rule, config=config, most_pages=most_pages, has_sinks=sinks is not None,
        interpreted=bool(interpret),
    )  # fmt: skip
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(jnp.maximum(visits.count, 1),),
            in_specs=[blocks[0], *whole_extra, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=blocks[1],
            scratch_shapes=[
                pltpu.VMEM((SLOTS, block_pages * sizes.page_rows, sizes.d), k_rows.dtype),
                pltpu.VMEM((SLOTS, block_pages * sizes.page_rows, sizes.dv), v_rows.dtype),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.VMEM((sets, rows, block_pages * sizes.page_size * sizes.heads), jnp.float32),
                pltpu.VMEM((sets, rows, LANES), jnp.float32),
                pltpu.VMEM((sets, rows, LANES), jnp.float32),
                pltpu.VMEM((sets, rows, sizes.dv), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((n, sets, rows, sizes.dv), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,  # page numbers are clipped above
        ),
        interpret=interpret,
        name="paged_attention",
    )(*tables, queries, *extra, k_rows, v_rows)
    return _from_tiles(out, tiles, sizes, block_q)


def _tile_of_visit(v, tile, *_):
    return tile[v], 0, 0, 0


def _rows_of(pages):
    """(num_pages, page_size, hk, d) -> (num_pages, page_size * hk, d): the same bytes, where hk fills whole tiles."""
    num_pages, page_size, hk, d = pages.shape
    return pages.reshape(num_pages, page_size * hk, d)


def _check_tables(tables, page_size: int) -> None:
    words = sum(table.size for table in tables)
    if words * 4 > SCALAR_BYTES:
        raise ValueError(
            f"paged_attention: page table and visits must fit in {SCALAR_BYTES} bytes of scalar memory; "
            f"got {words * 4}. Use pages of more than {page_size} tokens, or fewer sequences per call."
        )


def _to_tiles(q, tiles: Tiles, sizes: PagedSizes, block_q: int):
    """(total_q, hq, d) -> (tiles, sets, rows, d). Rows are queries, of each the heads of the set; then zeros."""
    token = jnp.clip(tiles.token[:, None] + jnp.arange(block_q), 0, q.shape[0] - 1)
    q = q if block_q == 1 and token.shape[0] == q.shape[0] else q[token]
    per_query = sizes.heads * sizes.group
    q = q.reshape(-1, block_q, sizes.sets, per_query, sizes.d).swapaxes(1, 2)
    q = q.reshape(-1, sizes.sets, block_q * per_query, sizes.d)
    return jnp.pad(q, ((0, 0), (0, 0), (0, sizes.rows(block_q) - q.shape[2]), (0, 0)))


def _from_tiles(out, tiles: Tiles, sizes: PagedSizes, block_q: int):
    per_query = sizes.heads * sizes.group
    out = out[:, :, : block_q * per_query].reshape(-1, sizes.sets, block_q, per_query, sizes.dv)
    out = out.swapaxes(1, 2).reshape(-1, block_q, sizes.hq, sizes.dv)
    if block_q == 1 and out.shape[0] == tiles.tile_of.shape[0]:
        return out[:, 0]
    return out[tiles.tile_of, tiles.row_of]


def _to_rows(sinks, sizes: PagedSizes, block_q: int, rows: int):
    """(hq,) -> (sets, rows, 128), in units of exponents of 2."""
    of_set = jnp.tile(sinks.astype(jnp.float32).reshape(sizes.sets, -1) * LOG2E, (1, block_q))
    of_set = jnp.pad(of_set, ((0, 0), (0, rows - of_set.shape[1])))
    return jnp.broadcast_to(of_set[:, :, None], (*of_set.shape, LANES))
