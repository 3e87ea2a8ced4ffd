"""The choice of a variant and its blocks: a pure function, always launchable, never over the VMEM limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_experts.cases import DECODE_TOKENS, GEMMA, GPT_OSS, MODELS, QWEN
from moe_experts.config import (
    DECODE_TOKENS as MOST_TOKENS,
)
from moe_experts.config import (
    DECODE_VMEM_LIMIT_BYTES,
    FEW_ROWS,
    LANES,
    MIB,
    PREFILL_VMEM_LIMIT_BYTES,
    SMALL_PREFILL_VMEM_LIMIT_BYTES,
    DecodeConfig,
    PrefillConfig,
    ProductsConfig,
    Sizes,
    choose,
    choose_decode,
    decode_vmem_bytes,
    prefill_vmem_bytes,
)
from moe_experts.stored import ALL, FORMATS

axis = st.integers(1, 20_000) | st.sampled_from([1, 127, 128, 129, 704, 2048, 2880, 4096, 14336])
all_sizes = st.builds(
    Sizes,
    t=st.integers(1, 600) | st.sampled_from([1, 16, 17, MOST_TOKENS, MOST_TOKENS + 1]),
    h=axis,
    w=axis,
    i=axis,
    e=st.integers(1, 1024),
    top_k=st.integers(1, 16),
    transposed=st.booleans(),
    stored=st.sampled_from([(), (), *((stored, stored) for stored in FORMATS.values())]),
)


def sizes_of(case) -> Sizes:
    return Sizes(case.t, case.h, case.w, case.i, case.e, case.top_k, case.transposed, case.stored)


@given(
    sizes=all_sizes,
    item=st.sampled_from([2, 4]),
    limit=st.sampled_from([4 * MIB, 16 * MIB, DECODE_VMEM_LIMIT_BYTES, 100 * MIB]),
)
def test_decode_blocks_fit_and_are_launchable(sizes, item, limit):
    config = choose_decode(sizes, item, limit)
    assert config == choose_decode(sizes, item, limit)
    if config is None:
        return
    assert sizes.h % config.block_h == 0
    assert config.block_h == sizes.h or config.block_h % LANES == 0
    assert decode_vmem_bytes(config, sizes, item) <= 0.8 * limit
    assert config.vmem_limit_bytes == limit
    assert config.chunk % LANES == 0
    assert choose_decode(sizes, item, 2 * limit) is not None


kinds = st.sampled_from([None, *PREFILL_VMEM_LIMIT_BYTES, "TPU v5", "TPU7x", "cpu"])


@given(sizes=st.builds(replace, all_sizes, t=st.integers(1, 70_000)), item=st.sampled_from([2, 4]), kind=kinds)
def test_every_choice_fits_and_is_launchable(sizes, item, kind):
    config = choose(sizes, item, kind)
    assert config == choose(sizes, item, kind)
    if sizes.stored and config != ProductsConfig():
        assert sizes.transposed
        assert sizes.h % 64 == sizes.i % 64 == 0  # half a byte: 64 rows are a register
    if isinstance(config, DecodeConfig):
        assert sizes.t <= MOST_TOKENS
    if isinstance(config, PrefillConfig):
        limit = PREFILL_VMEM_LIMIT_BYTES.get(kind or "", SMALL_PREFILL_VMEM_LIMIT_BYTES)
        assert config.vmem_limit_bytes == limit
        assert prefill_vmem_bytes(config, sizes, item) < limit
        assert sizes.h % LANES == 0
        least = 16 if sizes.stored else 32
        assert config.block_m % least == 0
        assert least <= config.block_m <= 512
        assert config.gate_chunk % LANES == 0
        assert config.tokens * sizes.top_k < 2**16
        calls = -(-sizes.t // config.tokens)
        assert config.tokens == -(-sizes.t // calls)  # calls of equal size


@pytest.mark.parametrize("tokens", DECODE_TOKENS)
@pytest.mark.parametrize("model", [m for m in MODELS if m.hidden % LANES == 0], ids=lambda model: model.name)
def test_models_decode_by_the_fused_kernel(model, tokens):
    assert isinstance(choose(sizes_of(model.case(tokens)), 2), DecodeConfig)


@pytest.mark.parametrize(("kind", "split"), [("TPU v6 lite", False), ("TPU7x", True), ("TPU v5", True)])
def test_weights_are_read_once_at_4096_tokens(kind, split):
    chosen = choose(sizes_of(QWEN.case(4096)), 2, kind)
    assert isinstance(chosen, PrefillConfig)
    assert (chosen.tokens, chosen.split) == (4096, split)


def test_the_first_block_is_small_where_few_slots_are_served():
    few, many = (choose(sizes_of(QWEN.case(tokens)), 2) for tokens in (1, 64))
    assert few.block_h < many.block_h
    assert many == choose(sizes_of(QWEN.case(64, experts_here=16)), 2)  # a step of more tokens takes longer


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_models_decode_by_a_fused_kernel(name):
    """With a scale per group of rows, only the tokens that an expert serves are worth computing."""
    by_rows = FORMATS[name].rows != ALL
    for model in (QWEN, GEMMA):
        few, many = (choose(sizes_of(model.case(tokens, quantized=name)), 2) for tokens in (FEW_ROWS, 64))
        assert isinstance(few, DecodeConfig)
        assert isinstance(many, PrefillConfig if by_rows else DecodeConfig)
        assert not by_rows or many.block_m == 16


def test_quantised_experts_too_wide_for_the_usual_memory_take_more_where_there_is_more():
    sizes = sizes_of(GPT_OSS.case(8, quantized="int8"))
    assert isinstance(choose(sizes, 2, "TPU v6 lite"), DecodeConfig)
    assert choose(sizes, 2, "TPU7x") == ProductsConfig()
