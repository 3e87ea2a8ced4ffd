"""Programs of moe-experts with quantised weights: what they are given, and the bytes they are held against."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")

from pallas_hub.bench.aot.programs import find_program, kernel_programs  # noqa: E402

SHAPE = "t=4,h=256,i=128,e=8,k=2"


def program(case: str, impl: str = "ours"):
    return find_program({"kernel": "moe-experts", "op": "forward", "case": case, "impl": impl, "blocks": None})


def expert_bytes(built) -> float:
    """Least bytes of one expert in use: of the case's routing there are as many as of any other impl."""
    return built.least_bytes - 2 * 4 * 256 * 2


def test_a_shape_may_name_a_format_whose_bytes_count():
    int8, int4, floats = (program(f"{SHAPE}{flag}") for flag in (",int8", ",int4", ""))
    assert [str(part.dtype) for part in (*int4.args[1:3], *int4.args[-2:])] == ["uint8", "uint8", "float32", "float32"]
    assert [part.shape for part in int4.args[-2:]] == [(8, 2, 256), (8, 1, 256)]
    numbers = expert_bytes(floats) / 2
    scales = numbers / (256 * 256 + 128 * 256) * 256 * 4  # of one row of columns, of each expert in use
    assert expert_bytes(int8) == numbers + 2 * scales
    assert expert_bytes(int4) == numbers / 2 + 3 * scales


def test_peers_read_bfloat16():
    built = program(f"{SHAPE},int8", "xla")
    assert [str(part.dtype) for part in built.args[1:3]] == ["bfloat16", "bfloat16"]
    assert built.least_bytes == program(SHAPE).least_bytes


def test_two_formats_at_once_are_refused():
    with pytest.raises(ValueError, match=r"^moe-experts: --shape takes one of int8, fp8, .*; got int4, int8\.$"):
        kernel_programs("moe-experts").shape_case(f"{SHAPE},int8,int4")
