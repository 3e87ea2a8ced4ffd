"""The committed numbers: a change for the worse fails with both numbers, and the recorded kernels still compile so."""

from __future__ import annotations

import copy

import pytest

from pallas_hub.bench.aot import baseline
from pallas_hub.bench.aot.hardware import HARDWARE

pytest.importorskip("jax")
libtpu = pytest.importorskip("libtpu", reason="skipped: needs libtpu, the TPU compiler")

OLD = {
    "case/forward/v6e": {
        "status": "compiled", "bundles": 1000, "spills": 0, "vmem_bytes": 4 << 20, "bytes": 67_000_000, "steps": 32
    }
}  # fmt: skip


def changed(**numbers):
    new = copy.deepcopy(OLD)
    new["case/forward/v6e"].update(numbers)
    return new


def test_equal_numbers_are_none_worse():
    result = baseline.compare(OLD, copy.deepcopy(OLD))
    assert (result.worse, result.better, result.compared) == ((), (), 5)
    assert "5 numbers compared with the baseline, none worse by more than 5%" in result.text()


@pytest.mark.parametrize(
    ("name", "now", "line"),
    [
        ("bundles", 1051, "case/forward/v6e: bundles 1000 -> 1051 (+5.1%)"),
        ("bytes", 80_000_000, "case/forward/v6e: bytes 67000000 -> 80000000 (+19.4%)"),
        ("spills", 9, "case/forward/v6e: spills 0 -> 9 (+9)"),
        ("vmem_bytes", 5 << 20, "case/forward/v6e: vmem_bytes 4194304 -> 5242880 (+25.0%)"),
        ("steps", 64, "case/forward/v6e: steps 32 -> 64 (+100.0%)"),
        ("bytes", None, "case/forward/v6e: bytes was 67000000, now unknown"),
    ],
)
def test_worse_numbers_fail_with_both(name, now, line):
    result = baseline.compare(OLD, changed(**{name: now}))
    assert result.worse == (line,)
    assert line in result.text()
    assert "--update" in result.text()


def test_within_tolerance_passes_and_better_is_told():
    assert baseline.compare(OLD, changed(bundles=1050)).worse == ()
    better = baseline.compare(OLD, changed(bundles=800))
    assert better.worse == ()
    assert better.better == ("case/forward/v6e: better: bundles 1000 -> 800 (-20.0%)",)


def test_what_stopped_compiling_is_worse():
    result = baseline.compare(OLD, {"case/forward/v6e": {"status": "refused"}})
    assert result.worse == ("case/forward/v6e: was compiled, now refused",)


def test_worsened_numbers_fail_the_command(monkeypatch, capsys):
    """The whole command on the real file, with the recorded bundles made 10 % smaller than the kernel's."""
    from pallas_hub.cli import main

    real = baseline.read

    def improved(kernel):
        recorded = real(kernel)
        for numbers in recorded["numbers"].values():
            if "bundles" in numbers:
                numbers["bundles"] = int(numbers["bundles"] * 0.9)
        return recorded

    command = ["aot", "rms-norm", "--check", "--workload", "llama-3-8b-4096", "--op", "forward", "--target", "v6e"]
    assert main(command) == 0
    assert "none worse" in capsys.readouterr().out
    monkeypatch.setattr(baseline, "read", improved)
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "llama-3-8b-4096/forward/v6e: bundles " in out
    assert "worse by more than 5%" in out


# Small enough for every run: what a user of the two kernels meets first.
CHOSEN = [
    ("rms-norm", ["llama-3-8b-4096"], ["forward"], ["v5e", "tpu7x"]),
    ("ragged-dot", ["qwen3-30b-a3b-gate-up-t64"], ["forward"], ["v6e"]),
]


@pytest.mark.parametrize(("kernel", "names", "ops", "targets"), CHOSEN, ids=lambda value: str(value))
def test_chosen_kernels_are_not_worse_than_recorded(kernel, names, ops, targets):
    result = baseline.check(kernel, targets, names, ops)
    assert not result.worse, result.text()


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kernel", ["rms-norm", "ragged-dot"])
def test_every_recorded_kernel_is_not_worse(kernel):
    result = baseline.check(kernel, list(HARDWARE), [], [])
    assert not result.worse, result.text()
    assert result.compared
