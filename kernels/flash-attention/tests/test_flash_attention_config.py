"""The block chooser: launchable blocks that fit VMEM, and a table of visits that fits scalar memory."""

from __future__ import annotations

import pytest
from flash_attention.config import (
    DEFAULT_VMEM_LIMIT_BYTES,
    LANES,
    backward_vmem_bytes,
    choose_backward_config,
    choose_config,
    forward_vmem_bytes,
    rows_per_span,
)
from hypothesis import assume, given
from hypothesis import strategies as st

lengths = st.integers(1, 300_000) | st.sampled_from([1, 127, 128, 129, 512, 513, 4096, 32768])
head_dims = st.sampled_from([16, 64, 80, 96, 128, 192, 256])


@given(
    lq=lengths,
    lk=lengths,
    group=st.sampled_from([1, 2, 6, 8, 16, 32]),
    d=head_dims,
    dtype_bytes=st.sampled_from([2, 4]),
)
def test_blocks_fit_and_are_launchable(lq, lk, group, d, dtype_bytes):
    assume(group * d <= 4096)
    for config, needed in (
        (choose_config(lq, lk, group, d, d, dtype_bytes), forward_vmem_bytes),
        (choose_backward_config(lq, lk, group, d, d, dtype_bytes), backward_vmem_bytes),
    ):
        assert needed(config, lq, group, d, d, dtype_bytes) <= 0.8 * DEFAULT_VMEM_LIMIT_BYTES
        for block, length in ((config.block_q, lq), (config.block_k, lk)):
            assert block % LANES == 0
            assert block == LANES or block < 2 * length  # never more than twice as long as what there is
        assert config.block_q % config.chunk == 0
        assert config.chunk % LANES == 0


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 8, 64])
def test_a_span_holds_at_least_a_block(group, d):
    config = choose_backward_config(1 << 18, 1 << 18, group, d, d, 2)
    assert rows_per_span(group, d) >= config.block_q
