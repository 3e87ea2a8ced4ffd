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
    kind=st.sampled_from([None, "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"]),
)
def test_every_choice_fits_and_is_aligned(part, m, n, items, backward, residual, kind):
    config = part("config")
    if backward:
        streams = config.backward_streams(*items, residual=residual, device_kind=kind)
    else:
        streams = config.forward_streams(*items, residual=residual)
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


def test_a_few_rows_less_make_no_block_partial(part):
    """5376 columns: 96 rows would be nearest to the size aimed at; 64 divide 4096."""
    config = part("config")
    assert config.choose(4096, 5376, config.backward_streams(2, 2, residual=False)).block_m == 64


@pytest.mark.parametrize(("kind", "n", "copies"), [("TPU7x", 4096, 8), ("TPU7x", 2048, 0), ("TPU v6 lite", 4096, 0)])
def test_copies_count_towards_vmem(part, kind, n, copies):
    config = part("config")
    plain, known = (config.backward_streams(2, 2, residual=False, device_kind=device) for device in (None, kind))
    blocks = config.choose(4096, n, known)
    more = config.vmem_bytes(blocks, n, known) - config.vmem_bytes(blocks, n, plain)
    assert more == copies * blocks.block_m * n
    assert config.makes_copies(blocks, 4096, n, known) == bool(copies)


def test_65536_columns(part):
    config = part("config")
    assert config.choose(64, 65_536, config.forward_streams(2, 2, residual=False)).block_n == 65_536
