"""Blocks of paged attention: what is chosen, and what is refused in words."""

from __future__ import annotations

import pytest
from flash_attention.paged_cases import MODEL_CASES
from flash_attention.paged_config import (
    MOST_ROWS,
    MOST_SCORES,
    PagedSizes,
    choose_block_q,
    choose_paged,
    paged_vmem_bytes,
)


def sizes_of(case, item=2):
    return PagedSizes(case.hq, case.hk, case.d, case.d, case.page, item)


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("block_q", [1, 8])
@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: case.name)
def test_blocks_fit_and_divide(case, block_q, item):
    sizes = sizes_of(case, item)
    config = choose_paged(sizes, block_q, case.most_pages)
    columns = config.block_pages * case.page * sizes.heads
    assert columns % config.chunk == 0
    assert config.block_pages & (config.block_pages - 1) == 0
    assert config.block_pages <= case.most_pages
    assert paged_vmem_bytes(config, sizes) * 5 <= config.vmem_limit_bytes * 4
    if block_q == 1:
        assert sizes.sets * sizes.rows(1) * columns <= MOST_SCORES or config.block_pages == 1


def test_a_visit_of_long_pages_is_one_mebibyte():
    for case in MODEL_CASES[:4]:
        config = choose_paged(sizes_of(case), 1, case.most_pages)
        assert config.block_pages * case.page * case.hk * case.d * 2 * 2 == 2**20


@pytest.mark.parametrize(
    ("hk", "d", "item", "heads", "sets"),
    [
        (4, 128, 2, 2, 2),
        (8, 128, 2, 2, 4),
        (2, 128, 2, 2, 1),
        (1, 128, 2, 1, 1),
        (3, 128, 2, 3, 1),
        (4, 64, 2, 4, 1),
        (4, 256, 2, 4, 1),
        (4, 128, 4, 1, 4),
    ],
)
def test_heads_of_a_set_share_words(hk, d, item, heads, sets):
    sizes = PagedSizes(hk * 4, hk, d, d, 16, item)
    assert (sizes.heads, sizes.sets) == (heads, sets)


def test_heads_are_taken_apart_where_they_share_words():
    assert [PagedSizes(8, hk, d, d, 16, 2, apart=True).heads for hk, d in ((4, 128), (1, 128), (4, 64))] == [1, 1, 4]


def test_tiles_grow_with_the_queries_of_a_sequence():
    sizes = sizes_of(MODEL_CASES[0])
    assert [choose_block_q(sizes, total, 8) for total in (0, 8, 9, 16, 33, 10_000)] == [1, 1, 2, 2, 8, 16]
    assert choose_block_q(sizes, 10_000, 8) * sizes.heads * sizes.group <= MOST_ROWS


@pytest.mark.parametrize(("page", "hk", "item", "step"), [(3, 2, 2, 16), (1, 8, 2, 16), (5, 1, 4, 8), (8, 1, 2, 16)])
def test_pages_of_odd_rows_are_refused(page, hk, item, step):
    rule = rf"page_size \* heads must be a multiple of {step} .*got {page} \* {hk} = {page * hk}"
    with pytest.raises(ValueError, match=rule):
        choose_paged(PagedSizes(hk, hk, 128, 128, page, item), 1, 4)


def test_a_page_too_large_for_vmem_is_refused():
    with pytest.raises(
        ValueError, match=r"a page must fit in VMEM some four times; got page_size = 65536 with 8 heads"
    ):
        choose_paged(PagedSizes(8, 8, 128, 128, 65536, 2), 1, 4)
