"""The block chooser is a pure function: whatever it picks fits, is aligned and covers the rows."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MIB = 1 << 20
PROPERTY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(
    m=st.integers(1, 100_000),
    n=st.one_of(st.integers(1, 300), st.integers(1, 262_144)),
    items=st.sampled_from([(2, 2), (2, 4), (4, 4)]),
    backward=st.booleans(),
    residual=st.booleans(),
)
def test_every_choice_fits_and_is_aligned(part, m, n, items, backward, residual):
    config = part("config")
    streams = (config.backward_streams if backward else config.forward_streams)(*items, residual=residual)
    chosen = config.choose(m, n, streams)
    assert 1 <= chosen.block_m <= m
    assert chosen.block_m % chosen.tile_m == 0
    assert chosen.block_m % 8 == 0 or chosen.block_m == m
    if chosen.block_n != n:
        assert chosen.block_n % 128 == 0
    used = config.vmem_bytes(chosen, n, streams)
    assert used <= chosen.vmem_limit_bytes * 7 // 8 <= 42 * MIB


@PROPERTY
@given(n=st.integers(1, 65_536), limit=st.sampled_from([16, 32, 64]))
def test_a_given_limit_is_kept_or_refused(part, n, limit):
    config = part("config")
    streams = config.backward_streams(4, 4, residual=True)
    try:
        chosen = config.choose(4096, n, streams, limits=(limit * MIB,))
    except config.NoConfig:
        assert n > 32_768
        assert limit == 16
        return
    assert chosen.vmem_limit_bytes == limit * MIB
    assert config.vmem_bytes(chosen, n, streams) <= limit * MIB * 7 // 8


@pytest.mark.parametrize("n", [2048, 4096, 5120, 8192])
def test_model_widths_keep_rows_whole_under_the_smallest_limit(part, n):
    config = part("config")
    for streams in (
        config.forward_streams(2, 2, residual=True),
        config.backward_streams(2, 2, residual=True),
    ):
        chosen = config.choose(4096, n, streams)
        assert (chosen.block_n, chosen.vmem_limit_bytes) == (n, 16 * MIB)
        assert chosen.block_m * n * 2 >= MIB // 2  # long DMAs


def test_65536_columns(part):
    config = part("config")
    assert config.choose(64, 65_536, config.forward_streams(2, 2, residual=False)).block_n == 65_536
