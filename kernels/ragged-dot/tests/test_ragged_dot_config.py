"""The block chooser: never over the VMEM limit, always launchable, weights of few rows read once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragged_dot.cases import DECODE_TOKENS, MODELS
from ragged_dot.config import (
    DEFAULT_VMEM_LIMIT_BYTES,
    LANES,
    MIB,
    choose_config,
    choose_weight_gradient_config,
    forward_vmem_bytes,
    weight_gradient_vmem_bytes,
)

sizes = st.integers(1, 70_000) | st.sampled_from([1, 127, 128, 129, 1025, 14336, 65536, 2**20])
limits = st.sampled_from([4 * MIB, 16 * MIB, 32 * MIB, DEFAULT_VMEM_LIMIT_BYTES, 100 * MIB])


@given(m=sizes, k=sizes, n=sizes, g=st.integers(1, 512), dtype_bytes=st.sampled_from([2, 4]), limit=limits)
def test_blocks_fit_and_are_launchable(m, k, n, g, dtype_bytes, limit):
    for choose, needed in (
        (choose_config, forward_vmem_bytes),
        (choose_weight_gradient_config, weight_gradient_vmem_bytes),
    ):
        config = choose(m, k, n, g, dtype_bytes, limit)
        assert needed(config, dtype_bytes) <= 0.8 * limit
        assert config.vmem_limit_bytes == limit
        assert config.block_m % 16 == 0
        assert 16 <= config.block_m <= 512
        assert config.block_m < m + 16  # never a tile more than there are rows
        for block, size in ((config.block_k, k), (config.block_n, n)):
            assert block == size or (block % LANES == 0 and 0 < block < size)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("tokens", DECODE_TOKENS)
def test_decode_reads_least_bytes(model, tokens):
    for case in model.cases(tokens):
        config = choose_config(case.m, case.k, case.n, case.g, 2)
        assert config.block_k == case.k  # so consecutive visits of a group share its block
        weights = sum(size > 0 for size in case.group_sizes) * case.k * case.n
        least = weights + case.m * (case.k + case.n)
        row_tiles = -(-case.m // config.block_m)
        lhs_reads = 1 if row_tiles == 1 else -(-case.n // config.block_n)  # a block that does not change stays
        moved = weights + lhs_reads * row_tiles * config.block_m * case.k + case.m * case.n
        assert moved <= 1.02 * least


@pytest.mark.parametrize("choose", [choose_config, choose_weight_gradient_config])
def test_nothing_fits(choose):
    message = r"no blocks of \(m, k, n\) = \(8, 256, 256\) .* vmem_limit_bytes = 1000; .* Raise vmem_limit_bytes"
    with pytest.raises(ValueError, match=message):
        choose(8, 256, 256, 2, 2, 1000)
