"""Choosing among candidates, and looking a choice up for a shape nobody tuned."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_hub.bench.aot import tuning
from pallas_hub.bench.aot.programs import Workload
from pallas_hub.bench.aot.report import KernelReport, Report
from pallas_hub.bench.kernel_source import load_jax_module

WORKLOAD = Workload("forward", "llama-3-8b-4096")
DEFAULT = {"block_m": 128, "block_n": 4096, "tile_m": 32, "vmem_limit_bytes": 16 << 20}


def report(us, spills=0, vmem=1 << 20, status="compiled", reason=""):
    kernel = KernelReport("k", vmem, 16 << 20, 100, 0, 0.0, spills, 0, 32, 1000, 10, us, us)
    return Report("", "v6e", status, reason, kernels=(kernel,) if status == "compiled" else (), xla_us=0.0)


def blocks(*sizes):
    return [DEFAULT | {"block_m": size} for size in sizes]


def test_the_fastest_candidate_wins():
    tuned = tuning.choose(WORKLOAD, blocks(128, 64, 256), [report(50.0), report(60.0), report(40.0)])
    assert tuned.use["block_m"] == 256
    assert tuned.gain == pytest.approx(0.25)


def test_the_default_stays_when_the_gain_means_nothing():
    tuned = tuning.choose(WORKLOAD, blocks(128, 64), [report(50.0), report(49.8)])
    assert tuned.use["block_m"] == 128
    assert tuned.gain == 0


def test_equal_times_are_decided_by_spills_then_vmem():
    reports = [report(90.0), report(50.0, spills=9), report(50.2, vmem=4 << 20), report(50.3, vmem=2 << 20)]
    assert tuning.choose(WORKLOAD, blocks(128, 64, 256, 512), reports).use["block_m"] == 512


def test_a_failing_candidate_is_data():
    tuned = tuning.choose(
        WORKLOAD, blocks(128, 4096), [report(50.0), report(None, status="refused", reason="needs 64M of VMEM")]
    )
    assert tuned.use["block_m"] == 128
    (line,) = tuned.failed
    assert "'block_m': 4096" in line
    assert line.endswith("needs 64M of VMEM")


def test_a_failing_default_is_replaced():
    tuned = tuning.choose(WORKLOAD, blocks(4096, 64), [report(None, status="refused", reason="x"), report(70.0)])
    assert tuned.use["block_m"] == 64
    assert tuned.gain == 0.0


def test_file_says_device_versions_date_and_gain_and_keeps_other_entries(tmp_path):
    path = tmp_path / "tuning" / "tpu_v6e.json"
    tuned = tuning.choose(WORKLOAD, blocks(128, 64), [report(50.0), report(40.0)])
    other = tuning.choose(Workload("forward", "llama-3-8b-64"), blocks(64), [report(5.0)])
    tuning.write("rms-norm", "v6e", [tuned], path)
    tuning.write("rms-norm", "v6e", [other], path)
    tuning.write("rms-norm", "v6e", [tuned], path)
    written = json.loads(path.read_text())
    assert written["device"] == "TPU v6 lite"
    assert {"kernel", "modelled", "entries"} <= written.keys()
    assert [(entry["when"]["m"], entry["gain"]) for entry in written["entries"]] == [(4096, 0.25), (64, 0.0)]


ENTRIES = [
    {"when": {"op": "forward", "m": 4096, "n": 4096}, "use": DEFAULT | {"block_m": 256}},
    {"when": {"op": "forward", "m": 64, "n": 4096}, "use": DEFAULT | {"block_m": 64}},
]


@pytest.mark.parametrize(
    ("when", "block_m"),
    [
        ({"op": "forward", "m": 4096, "n": 4096}, 256),
        ({"op": "forward", "m": 3000, "n": 5376}, 256),
        ({"op": "forward", "m": 80, "n": 2048}, 64),
        ({"op": "forward", "m": 512, "n": 4096}, 128),  # too far from both
        ({"op": "backward", "m": 4096, "n": 4096}, 128),
        ({"op": "forward", "m": 4096}, 128),
    ],
)
def test_nearest_tuned_shape_or_the_default(when, block_m):
    assert tuning.look_up(ENTRIES, when, DEFAULT, lambda use: True)["block_m"] == block_m


def test_broken_entries_are_passed_over():
    broken = [{}, {"when": ENTRIES[0]["when"]}, {"when": ENTRIES[0]["when"], "use": {"rows": 3}}]
    assert tuning.look_up(broken, ENTRIES[0]["when"], DEFAULT, lambda use: True) == DEFAULT


@given(m=st.integers(1, 1 << 20), n=st.integers(1, 20_000), block_m=st.integers(1, 4096))
def test_looked_up_blocks_never_exceed_the_limit(m, n, block_m):
    config = load_jax_module("rms-norm", "config")
    streams = config.forward_streams(2, 2, residual=False)
    default = vars(config.choose(m, n, streams))

    def fits(use):
        chosen = config.Config(**use)
        return chosen.block_n == n and config.vmem_bytes(chosen, n, streams) <= chosen.vmem_limit_bytes

    tuned = [{"when": {"m": m, "n": max(1, n - 1)}, "use": default | {"block_m": block_m, "block_n": n}}]
    found = tuning.look_up(tuned, {"m": m, "n": n}, dict(default), fits)
    assert found == default or fits(found)
    assert config.vmem_bytes(config.Config(**found), n, streams) <= found["vmem_limit_bytes"]
