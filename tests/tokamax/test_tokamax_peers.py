"""Which peers an experts layer is compared with, and what is said of one whose time only the compiler reckons."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pallas_hub.bench.aot import kernels, moe_peers
from pallas_hub.bench.aot.programs import kernel_programs
from pallas_hub.bench.aot.report import build_report
from pallas_hub.bench.aot.runner import Job

NEWEST = list(moe_peers.PEERS)
module = kernel_programs("moe-experts")


@pytest.fixture
def tokamax(monkeypatch):
    """Say which tokamax is installed; None for none."""

    def install(version):
        def find(name):
            if version is None:
                raise moe_peers.importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(moe_peers.importlib.metadata, "version", find)
        monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: version and object())

    return install


@pytest.mark.parametrize(
    ("version", "newest"), [("0.0.12", []), ("0.0.17", NEWEST), ("0.1.0", NEWEST)], ids=["old", "new", "newer"]
)
def test_vs_tokamax_takes_what_that_version_has(tokamax, version, newest):
    tokamax(version)
    assert kernels._peers(module, "moe-experts", ["tokamax"]) == ["tokamax", *newest]


def test_xla_of_an_experts_layer_is_lax(tokamax):
    tokamax(None)
    assert kernels._peers(module, "moe-experts", ["xla"]) == ["lax"]
    assert kernels._peers(kernel_programs("ragged-dot"), "ragged-dot", ["xla"]) == ["xla", "xla-kernel"]


@pytest.mark.parametrize(
    ("version", "name", "message"),
    [
        ("0.0.12", "tokamax-fused", "--vs tokamax-fused needs tokamax 0.0.17 or newer, which needs Python 3.12; try"),
        (None, "tokamax", r"--vs tokamax needs tokamax; try `pip install tokamax==0\.0\.12`\."),
        ("0.0.17", "tokamax-slow", "--vs for moe-experts must be among products, jax, tokamax, lax, .*tokamax-slow"),
    ],
)
def test_a_peer_that_is_not_there_is_told(tokamax, version, name, message):
    tokamax(version)
    with pytest.raises(ValueError, match=message):
        kernels._peers(module, "moe-experts", [name])


def test_the_repo_made_of_tokamax_s_op_is_a_peer():
    with pytest.raises(
        ValueError, match=r"tokamax-ragged-dot is a peer, which `pallas-hub aot ragged-dot --vs tokamax`"
    ):
        kernel_programs("tokamax-ragged-dot")


def test_layers_that_the_newest_kernels_lack_have_no_row_of_theirs():
    layer = {"bias": False, "gate": "concatenated", "activation": "silu", "limit": None}
    assert moe_peers.takes(SimpleNamespace(**layer))
    for change in (
        {"bias": True},
        {"gate": "interleaved"},
        {"activation": "gelu"},
        {"limit": 7.0},
        {"quantized": "int8"},
    ):
        assert not moe_peers.takes(SimpleNamespace(**layer | change))


def test_where_the_profiler_stops_the_compilers_own_cost_is_the_time():
    job = Job("v6e", {"kernel": "moe-experts", "impl": "lax"})
    cost = {"seconds": 0.0465, "flops": 39.6e12, "bytes": 5.9e9}
    result = {"status": "compiled", "pieces": 1, "xla_reason": "signal 6", "cost": cost}
    report = build_report(job, result, least_bytes=10**9)
    assert (report.time_us, report.bytes) == (pytest.approx(46500), 5_900_000_000)
    assert report.notes == (
        "time and bytes by the compiler's own cost analysis (39600 GFLOP), since its profiler stops: signal 6",
    )
    # It can't see into kernels, so for a program with some it is no answer.
    code = {"bundles": 1, "conditional": 0, "matmul": 0, "matmul_slots": 1, "spills": 0, "fills": 0, "once": 0}
    kernel = {"name": "k", "vmem_bytes": 1, "whole": {**code, "unknown_loops": 0}, "step": None}
    assert build_report(job, {**result, "kernels": [kernel]}).time_us is None
    assert build_report(job, {**result, "cost": {}}).time_us is None
