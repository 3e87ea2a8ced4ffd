"""The programs of our kernels: every workload builds, and what the kernels move stands against the least bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("jax")

from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.kernels import choose_workloads
from pallas_hub.bench.aot.programs import find_program, kernel_programs
from pallas_hub.bench.aot.traffic import count_traffic

KERNELS = ["rms-norm", "ragged-dot"]


def program(kernel, op, case, impl="ours", blocks=None):
    return find_program({"kernel": kernel, "op": op, "case": case, "impl": impl, "blocks": blocks})


def moved(built):
    fn, args = built.counted_as or (built.fn, built.args)
    return sum(traffic.bytes for traffic in count_traffic(fn, args))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_workload_builds_for_everyone(kernel):
    module = kernel_programs(kernel)
    workloads = choose_workloads(kernel)
    assert {workload.op for workload in workloads} == set(module.OPS)
    for workload in workloads:
        blocks = module.own_blocks(workload.op, workload.case, "v6e")
        for impl in ("ours", *module.PEERS):
            built = program(kernel, workload.op, workload.case, impl, blocks if impl == "ours" else None)
            assert built.least_bytes > 0
            assert all(hasattr(arg, "shape") for arg in built.args)


@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_are_distinct_and_hold_the_default(kernel):
    module = kernel_programs(kernel)
    for workload in choose_workloads(kernel):
        found = module.tune_blocks(workload.op, workload.case, "v6e")
        assert len({tuple(blocks.items()) for blocks in found}) == len(found)
        if workload.case in ("llama-3-8b-4096", "qwen3-30b-a3b-gate-up-t64"):
            assert module.own_blocks(workload.op, workload.case, "v6e") in found
            assert len(found) > 3


def test_least_bytes_of_rms_norm():
    row = 4096 * 4096 * 2
    assert program("rms-norm", "forward", "llama-3-8b-4096").least_bytes == 2 * row + 4096 * 2
    assert program("rms-norm", "forward", "llama-3-8b-4096-residual").least_bytes == 4 * row + 4096 * 2
    assert program("rms-norm", "backward", "llama-3-8b-4096").least_bytes == 3 * row + 2 * 4096 * 2


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("case", ["llama-3-8b-4096", "llama-3-8b-4096-residual"])
def test_rms_norm_moves_each_array_once(case, op):
    built = program("rms-norm", op, case)
    assert moved(built) == built.least_bytes


@pytest.mark.parametrize("product", ["gate-up", "down"])
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_ragged_dot_reads_only_the_experts_in_use_and_each_once(tokens, product):
    built = program("ragged-dot", "forward", f"qwen3-30b-a3b-{product}-t{tokens}")
    assert built.least_bytes <= moved(built) <= 1.02 * built.least_bytes


def test_least_bytes_count_the_experts_with_rows():
    one = program("ragged-dot", "forward", "qwen3-30b-a3b-gate-up-t1")
    assert one.least_bytes == (8 * (2048 + 1536) + 8 * 2048 * 1536) * 2
    gradient = program("ragged-dot", "backward-rhs", "qwen3-30b-a3b-gate-up-t1")
    assert gradient.least_bytes == (8 * (2048 + 1536) + 128 * 2048 * 1536) * 2


def test_peer_bytes_at_the_same_tile():
    """megablox walks the same visits, so at one tile both move the same bytes."""
    tile = {"block_m": 128, "block_k": 2048, "block_n": 512}
    case = "qwen3-30b-a3b-gate-up-t64"
    peer = moved(program("ragged-dot", "forward", case, "jax", tile))
    ours = moved(program("ragged-dot", "forward", case, "ours", tile))
    assert ours <= peer <= 1.02 * ours


def test_tokamax_is_counted_as_megablox():
    pytest.importorskip("tokamax", reason="skipped: needs tokamax")
    tile = {"block_m": 128, "block_k": 2048, "block_n": 512}
    tokamax = program("ragged-dot", "forward", "qwen3-30b-a3b-gate-up-t64", "tokamax", tile)
    megablox = program("ragged-dot", "forward", "qwen3-30b-a3b-gate-up-t64", "jax", tile)
    assert moved(tokamax) == moved(megablox)


@pytest.mark.parametrize("target", HARDWARE)
def test_moe_experts_programs(target):
    module = kernel_programs("moe-experts")
    for workload in choose_workloads("moe-experts"):
        for impl in ("ours", *module.PEERS):
            blocks = module.own_blocks(workload.op, workload.case, target) if impl == "ours" else None
            built = program("moe-experts", workload.op, workload.case, impl, blocks)
            assert built.least_bytes > 0
            assert built.flops > 0
    case = module.find_case("qwen3-30b-a3b-t1")
    built = program("moe-experts", "forward", case.name, "ours", None)
    assert built.least_bytes == 2 * (8 * 3 * 768 * 2048 + 2 * 2048)  # eight experts, a token in and out


def test_a_kernel_without_tuned_blocks_says_so(monkeypatch):
    monkeypatch.setattr("pallas_hub.bench.aot.tuning.require_libtpu", lambda: None)
    from pallas_hub.bench.aot.tuning import tune

    with pytest.raises(ValueError, match=r"^tune: moe-experts looks up no tuned blocks; its config.py computes them"):
        tune("moe-experts", choose_workloads("moe-experts")[:1], "v6e")


def test_jax_files_load_without_torch(tmp_path):
    """Also those of a kernel that holds another one."""
    script = (
        "import sys; sys.modules['torch'] = None; from pallas_hub.bench.kernel_source import load_jax_module as load\n"
    )
    script += "print([load(name, 'kernel').__name__ for name in ('rms-norm', 'ragged-dot', 'moe-experts')])"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
