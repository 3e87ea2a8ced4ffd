"""The committed numbers: a change for the worse fails with both numbers, and the recorded kernels still compile so."""

from __future__ import annotations

import copy

import pytest

from pallas_hub.bench.aot import baseline
from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.kernels import Wish, compile_wishes
from pallas_hub.bench.aot.programs import kernel_programs
from pallas_hub.bench.kernel_source import kernel_folder
from pallas_hub.torch_bridge.tuning import read_entries

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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", sorted(path.stem for path in baseline.FOLDER.glob("*.json")))
def test_every_recorded_kernel_compiles_and_is_not_worse(kernel):
    """All workloads, ops and targets of the committed file, at the blocks that the kernel takes by itself."""
    result = baseline.check(kernel, list(HARDWARE), [], [])
    assert not result.worse, result.text()
    recorded = baseline.read(kernel)["numbers"]
    assert {key.rpartition("/")[2] for key in recorded} == set(HARDWARE)
    assert result.compared == sum(len(numbers) - 1 for numbers in recorded.values() if len(numbers) > 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", ["rms-norm", "ragged-dot"])
def test_every_tuned_configuration_compiles(kernel):
    targets = {hardware.device_kind: target for target, hardware in HARDWARE.items()}
    wishes = [
        Wish(kernel, kernel_programs(kernel).tuned_workload(entry["when"]), targets[device], "ours", entry["use"], True)
        for device, entries in read_entries(kernel, kernel_folder(kernel) / "tuning").items()
        for entry in entries
    ]
    if not wishes:
        pytest.skip("skipped: no tuned blocks are shipped for this kernel")
    for wish, report in zip(wishes, compile_wishes(wishes, around=False), strict=True):
        assert report.status == "compiled", (wish, report.reason)


def test_every_kernel_has_a_baseline():
    """But for those that are made of other libraries' ops."""
    kernels = {path.parent.name for path in kernel_folder("rms-norm").parents[2].glob("*/build.toml")}
    made = {path.parent.name for path in kernel_folder("rms-norm").parents[2].glob("*/tokamax.toml")}
    assert {path.stem for path in baseline.FOLDER.glob("*.json")} >= kernels - made
