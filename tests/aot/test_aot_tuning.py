"""Choosing among candidates, and the file that a kernel finds the choice in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pallas_hub.bench.aot import tuning
from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.programs import Workload, find_program, kernel_programs
from pallas_hub.bench.aot.report import KernelReport, Report
from pallas_hub.bench.kernel_source import kernel_folder, load_jax_module
from pallas_hub.registry.source import read_source

WORKLOAD = Workload("forward", "llama-3-8b-4096")
DEFAULT = {"block_m": 128, "block_n": 4096, "tile_m": 32, "vmem_limit_bytes": 16 << 20}


def report(us, spills=0, vmem=1 << 20, status="compiled", reason="", steps=32, fill=0):
    kernel = KernelReport("k", vmem, 16 << 20, 100, 0, 0.0, spills, 0, steps, 1000, fill, us, us)
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
    reports = [
        report(90.0, spills=10),
        report(50.0, spills=9),
        report(50.2, vmem=4 << 20),
        report(50.3, vmem=2 << 20),
    ]
    assert tuning.choose(WORKLOAD, blocks(128, 64, 256, 512), reports).use["block_m"] == 512


def test_more_spills_than_the_default_has_are_no_gain():
    tuned = tuning.choose(WORKLOAD, blocks(128, 64, 256), [report(50.0), report(40.0, spills=1), report(45.0)])
    assert tuned.use["block_m"] == 256


@pytest.mark.parametrize(("steps", "block_m"), [(64, 128), (32, 64), (16, 64)])
def test_a_shorter_fill_for_more_steps_is_no_gain(steps, block_m):
    """1.64 MB are 1 us on a v6e: 2 us of the candidate's gain are its shorter fill."""
    reports = [report(50.0, fill=4_920_000), report(48.0, fill=1_640_000, steps=steps)]
    assert tuning.choose(WORKLOAD, blocks(128, 64), reports).use["block_m"] == block_m


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


@pytest.mark.parametrize("status", ["timed out", "crashed", "no estimate"])
def test_a_default_without_a_time_stays(status):
    tuned = tuning.choose(WORKLOAD, blocks(128, 64), [report(None, status=status, reason="x"), report(70.0)])
    assert (tuned.is_default, tuned.use["block_m"]) == (True, 128)


def test_file_says_device_versions_date_and_gain_and_keeps_other_entries(tmp_path):
    path = tmp_path / "tuning" / "tpu_v6e.json"
    tuned = tuning.choose(WORKLOAD, blocks(128, 64), [report(50.0), report(40.0)])
    reports = [report(None, status="refused", reason="needs 64M of VMEM"), report(5.0)]
    other = tuning.choose(Workload("forward", "llama-3-8b-64"), blocks(128, 64), reports)
    tuning.write("rms-norm", "v6e", [tuned], path)
    tuning.write("rms-norm", "v6e", [other], path)
    tuning.write("rms-norm", "v6e", [tuned], path)
    written = json.loads(path.read_text())
    assert written["device"] == "TPU v6 lite"
    assert {"kernel", "modelled", "entries"} <= written.keys()
    assert [(entry["when"]["m"], entry["gain"]) for entry in written["entries"]] == [(4096, 0.25), (64, 0.0)]


def test_where_the_default_is_best_there_is_no_entry(tmp_path):
    path = tmp_path / "tpu_v6e.json"
    gained = tuning.choose(WORKLOAD, blocks(128, 64), [report(50.0), report(40.0)])
    best_already = tuning.choose(WORKLOAD, blocks(128, 64), [report(50.0), report(49.9)])
    tuning.write("rms-norm", "v6e", [best_already], path)
    assert not path.exists()
    tuning.write("rms-norm", "v6e", [gained], path)
    tuning.write("rms-norm", "v6e", [best_already], path)  # the kernel has caught up
    assert not path.exists()


def test_the_kernel_finds_what_was_written(tmp_path, monkeypatch):
    """The same sizes in the file and in the look-up, for every op; and `aot` shows and says what the kernel takes."""
    from pallas_hub.bench.aot import kernels

    for kernel, case in (("rms-norm", "llama-3-8b-4096-residual"), ("ragged-dot", "qwen3-30b-a3b-down-t64")):
        module = kernel_programs(kernel)
        monkeypatch.setattr(load_jax_module(kernel, "tuned"), "FOLDER", tmp_path / kernel)
        for op in module.OPS:
            default = module.default_blocks(op, case, "v6e")
            assert module.own_blocks(op, case, "v6e") == default
            use = next(blocks for blocks in module.tune_blocks(op, case, "v6e") if blocks != default)
            tuned = tuning.choose(Workload(op, case), [default, use], [report(50.0), report(40.0)])
            tuning.write(kernel, "v6e", [tuned], tmp_path / kernel / "tpu_v6e.json")
            read_entries(kernel).cache_clear()
            wish = kernels.own_wish(kernel, Workload(op, case), "v6e")
            assert wish.blocks == use
            assert module.own_blocks(op, case, "v5e") == module.default_blocks(op, case, "v5e")
            program = find_program(wish.program)
            assert any(note.startswith("tuned blocks; the default is ") for note in kernels._notes(wish, program))


def read_entries(kernel):
    return load_jax_module(kernel, "_bridge.tuning").read_entries


@pytest.mark.parametrize("kernel", ["rms-norm", "ragged-dot"])
def test_shipped_files_are_of_this_kernel_and_gain(kernel):
    devices = {hardware.device_kind for hardware in HARDWARE.values()}
    paths = list((kernel_folder(kernel) / "tuning").glob("*"))
    if not paths:
        pytest.skip("skipped: no tuned blocks are shipped for this kernel")
    for path in paths:
        written = json.loads(path.read_text())
        assert written["kernel"] == kernel
        assert written["device"] in devices
        assert written["entries"]
        assert all(entry["gain"] >= tuning.MIN_GAIN for entry in written["entries"])


@pytest.mark.parametrize("kernel", ["rms-norm", "ragged-dot"])
def test_the_look_up_is_published_and_needs_neither_torch_nor_jax(kernel, tmp_path):
    name = kernel.replace("-", "_")
    for path, data in read_source(kernel).files.items():
        target = tmp_path / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    (tmp_path / name / "__init__.py").write_text("")  # which imports torch
    program = (
        f"import sys, {name}.tuned as t\n"
        "assert not {'torch', 'jax'} & sys.modules.keys()\n"
        "print(t.FOLDER, t.look_up.__module__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(tmp_path / name / "tuning"), f"{name}._bridge.tuning"]
