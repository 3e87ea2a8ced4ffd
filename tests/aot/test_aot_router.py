"""The router's programs: they build for everyone, and the kernel moves no more than logits and results."""

from __future__ import annotations

import re

import pytest

jax = pytest.importorskip("jax")

from pallas_hub.bench.aot import of_router  # noqa: E402
from pallas_hub.bench.aot.kernels import choose_workloads  # noqa: E402
from pallas_hub.bench.aot.programs import find_program, folder_of  # noqa: E402
from pallas_hub.bench.aot.traffic import count_traffic  # noqa: E402


def program(case, impl="ours"):
    return find_program({"kernel": "router", "op": "forward", "case": case, "impl": impl, "blocks": None})


@pytest.mark.parametrize("workload", choose_workloads("router"), ids=lambda workload: workload.case)
def test_ours_and_xla_take_and_give_the_same(workload):
    shapes = []
    for impl in ("ours", "xla"):
        built = program(workload.case, impl)
        shapes.append((built.args, built.least_bytes, jax.eval_shape(built.fn, *built.args)))
    assert shapes[0] == shapes[1]


def test_logits_are_read_once_and_results_written_once():
    built = program("qwen3-30b-a3b-t4096")
    assert built.least_bytes == 4096 * 128 * 2 + 4096 * 8 * (2 + 4)
    assert sum(traffic.bytes for traffic in count_traffic(built.fn, built.args)) == built.least_bytes


def test_a_shape_of_the_users_own():
    built = program("t=256,e=64,k=6")
    assert [part.shape for part in jax.eval_shape(built.fn, *built.args)] == [(256, 6), (256, 6)]
    assert of_router.own_blocks("forward", "t=256,e=64,k=6", "v6e") == {"block_t": 256}
    message = "router: --shape needs k at most e = 4, the experts; got k=8."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        program("t=1,e=4,k=8")
    with pytest.raises(ValueError, match="router has no workload 'llama'; there are: qwen3-30b-a3b-t64, "):
        program("llama")


def test_the_code_is_that_of_moe_experts():
    assert folder_of("router") == "moe-experts"
