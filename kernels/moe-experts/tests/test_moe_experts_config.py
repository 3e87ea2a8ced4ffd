"""The choice of a variant and its blocks: a pure function, always launchable, never over the VMEM limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_experts.cases import DECODE_TOKENS, MODELS, QWEN
from moe_experts.config import (
    DECODE_TOKENS as MOST_TOKENS,
)
from moe_experts.config import (
    DECODE_VMEM_LIMIT_BYTES,
    LANES,
    MIB,
    PREFILL_VMEM_LIMIT_BYTES,
    SMALL_PREFILL_VMEM_LIMIT_BYTES,
    DecodeConfig,
    PrefillConfig,
    Sizes,
    choose,
    choose_decode,
    decode_vmem_bytes,
    prefill_vmem_bytes,
)

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
)


def sizes_of(case) -> Sizes:
    return Sizes(case.t, case.h, case.w, case.i, case.e, case.top_k, case.transposed)


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
    if isinstance(config, DecodeConfig):
        assert sizes.t <= MOST_TOKENS
    if isinstance(config, PrefillConfig):
        limit = PREFILL_VMEM_LIMIT_BYTES.get(kind or "", SMALL_PREFILL_VMEM_LIMIT_BYTES)
        assert config.vmem_limit_bytes == limit
        assert prefill_vmem_bytes(config, sizes, item) < limit
        assert sizes.h % LANES == 0
        assert config.block_m % 32 == 0
        assert 32 <= config.block_m <= 512
        assert config.tokens * sizes.top_k < 2**16
        calls = -(-sizes.t // config.tokens)
        assert config.tokens == -(-sizes.t // calls)  # calls of equal size


@pytest.mark.parametrize("tokens", DECODE_TOKENS)
@pytest.mark.parametrize("model", [m for m in MODELS if m.hidden % LANES == 0], ids=lambda model: model.name)
def test_models_decode_by_the_fused_kernel(model, tokens):
    assert isinstance(choose(sizes_of(model.case(tokens)), 2), DecodeConfig)


def test_the_first_block_is_small_where_few_slots_are_served():
    few, many = (choose(sizes_of(QWEN.case(tokens)), 2) for tokens in (1, 64))
    assert few.block_h < many.block_h
    assert many == choose(sizes_of(QWEN.case(64, experts_here=16)), 2)  # a step of more tokens takes longer
