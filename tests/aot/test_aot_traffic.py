"""Traffic is counted from grid and index maps: kernels for which the right number follows from a line of arithmetic."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
import aot_kernels as toy  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pallas_hub.bench.aot.traffic import TrafficUnknown, count_traffic  # noqa: E402

F32 = 4


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_each_block_in_once_and_out_once():
    (traffic,) = count_traffic(toy.add_one, [shape(256, 512)], rows=64)
    assert traffic.grid == (4,)
    assert traffic.bytes == 2 * 256 * 512 * F32
    assert [operand.copies for operand in (*traffic.inputs, *traffic.outputs)] == [4, 4]
    assert traffic.fill_bytes == 2 * 64 * 512 * F32


def test_last_block_is_cut_at_the_end_of_the_array():
    (traffic,) = count_traffic(toy.add_one, [shape(100, 128)], rows=64)
    assert traffic.steps == 2
    assert traffic.bytes == 2 * 100 * 128 * F32


def test_a_block_that_stays_is_copied_once():
    (traffic,) = count_traffic(toy.matmul, [shape(512, 256), shape(256, 128)])
    x, w = traffic.inputs
    assert (x.copies, w.copies) == (4, 1)
    assert traffic.bytes == (512 * 256 + 256 * 128 + 512 * 128) * F32


@pytest.mark.parametrize(
    ("table", "copies"),
    [((0, 1, 2, 3), 4), ((0, 0, 0, 0), 1), ((3, 3, 1, 1), 2), ((0, 1, 0, 1), 4)],
)
def test_table_lookups_are_followed(table, copies):
    (traffic,) = count_traffic(toy.gather_blocks, [np.array(table, np.int32), np.int32(4), shape(64, 128)])
    assert traffic.inputs[0].copies == copies
    assert traffic.bytes == (copies + 4) * 8 * 128 * F32


def test_grid_known_only_from_a_value():
    (traffic,) = count_traffic(toy.gather_blocks, [np.arange(4, dtype=np.int32), np.int32(2), shape(64, 128)])
    assert traffic.steps == 2
    assert traffic.outputs[0].copies == 2


def test_values_are_followed_through_operations():
    def reversed_table(table, count, x):
        return toy.gather_blocks(jnp.zeros_like(table) + table[::-1] // 2, count + 1, x)

    (traffic,) = count_traffic(reversed_table, [np.arange(4, dtype=np.int32), np.int32(3), shape(64, 128)])
    assert traffic.steps == 4
    assert traffic.inputs[0].copies == 2  # 1, 1, 0, 0


def test_missing_values_are_named():
    table = shape(4, dtype=jnp.int32)
    with pytest.raises(TrafficUnknown, match="gather_blocks: the grid depends on an argument given as a shape only"):
        count_traffic(toy.gather_blocks, [table, shape(dtype=jnp.int32), shape(64, 128)])
    with pytest.raises(TrafficUnknown, match=r"gather_blocks: .* is indexed by an argument given as a shape only"):
        count_traffic(toy.gather_blocks, [table, np.int32(4), shape(64, 128)])


def test_an_endless_grid_is_not_walked():
    args = [np.zeros(4, np.int32), np.int32(1 << 24), jax.ShapeDtypeStruct((1024, 128), jnp.float32)]
    with pytest.raises(TrafficUnknown, match="a grid of 16777216 steps is not walked, only up to 8388608"):
        count_traffic(toy.gather_blocks, args)


def test_copies_of_its_own_are_not_passed_off_as_counted():
    (traffic,) = count_traffic(toy.copies_by_itself, [shape(64, 128)])
    assert not traffic.counted
    assert traffic.as_numbers()["bytes"] is None


def test_two_kernels_in_a_program_come_in_order():
    traffic = count_traffic(lambda x: toy.add_one(toy.add_one(x, rows=32), rows=64), [shape(128, 128)])
    assert [one.steps for one in traffic] == [4, 2]
