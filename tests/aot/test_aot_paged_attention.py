"""The programs of paged attention: what the kernel copies stands against the least bytes."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from pallas_hub.bench.aot.kernels import choose_workloads
from pallas_hub.bench.aot.programs import find_program, kernel_programs
from pallas_hub.bench.aot.traffic import count_traffic

MODULE = kernel_programs("paged-attention")


def program(case, impl="ours", blocks=None):
    return find_program({"kernel": "paged-attention", "op": "decode", "case": case, "impl": impl, "blocks": blocks})


def test_every_workload_builds():
    for workload in choose_workloads("paged-attention"):
        for impl in ("ours", *MODULE.PEERS):
            built = program(workload.case, impl)
            assert built.least_bytes > 0
            assert built.flops > 0
        for target in ("v5e", "v6e", "tpu7x"):
            assert MODULE.peer_blocks("decode", workload.case, target, "jax-paged")


@pytest.mark.parametrize("page", [32, 128])
def test_each_page_is_copied_once_and_nothing_else(page):
    case = MODULE.find_case(f"qwen3-30b-a3b-s64-c4096-page{page}")
    fn, args = program(case.name).counted_as
    (traffic,) = count_traffic(fn, args)
    pages = sum(-(-length // page) for length in case.lengths())
    tiles = 2 * case.s * case.hq * case.d * 2  # queries in, results out
    assert traffic.bytes == pages * page * case.hk * case.d * 2 * 2 + tiles
    block = MODULE.own_blocks("decode", case.name, "v6e")["block_pages"]
    assert traffic.steps == sum(-(-length // (block * page)) for length in case.lengths())


def test_least_bytes_are_the_tokens_in_use():
    case = MODULE.find_case("s=3,c=100,hq=8,hk=2,d=128,page=32")
    rows = 2 * sum(case.lengths()) * case.hk + 2 * case.s * case.hq
    assert program(case.name).least_bytes == rows * case.d * 2


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("s=3,c=100,hq=7,hk=2,d=128,page=32", r"hq to be a multiple of hk = 2; got 7"),
        ("s=4096,c=8192,hq=8,hk=2,d=128,page=32", r"s \* c up to 16777216; got 33554432"),
        ("s=3,c=100,hq=8,hk=2,d=128", r"no page"),
    ],
)
def test_shapes_that_are_refused(shape, words):
    with pytest.raises(ValueError, match=words):
        MODULE.find_case(shape)
