"""What the commands read and write: broken, foreign or unwritable files, two commands at once, baselines that lie."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

pytest.importorskip("jax")

from pallas_hub.bench.aot import baseline, runner, tuning
from pallas_hub.bench.aot.files import alone_in, check_writable, replace_text
from pallas_hub.bench.aot.programs import Workload
from pallas_hub.bench.aot.runner import Job

KEY = "llama-3-8b-4096/forward/v6e"
NUMBERS = {"status": "compiled", "bundles": 100, "spills": 0, "vmem_bytes": 1 << 20, "bytes": 10**6, "steps": 8}
USE = {"block_m": 64, "block_n": 4096, "tile_m": 16, "vmem_limit_bytes": 32 << 20}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Write numbers as the baseline of rms-norm; everything asked for compiles to NUMBERS, or to `now`."""
    now = {}

    def compile_all(kernel, targets, names, ops, options, only=None):
        keys = [
            baseline._key(workload, target)
            for target in targets
            for workload in baseline.choose_workloads(kernel, names, ops)
        ]
        return {key: now.get(key, NUMBERS) for key in keys if only is None or key in only}

    monkeypatch.setattr(baseline, "FOLDER", tmp_path)
    monkeypatch.setattr(baseline, "_compile", compile_all)

    def write(numbers):
        body = {"kernel": "rms-norm", "versions": baseline._versions(), "numbers": numbers}
        (tmp_path / "rms-norm.json").write_text(json.dumps(body))
        return now

    return write


def test_a_recorded_workload_that_is_gone_fails_the_check_until_updated(recorded):
    recorded({KEY: NUMBERS, "llama-2-4096/forward/v6e": NUMBERS})
    result = baseline.check("rms-norm", ["v6e"], [], [])
    (line,) = result.worse
    assert line.startswith("llama-2-4096/forward/v6e: recorded, but rms-norm has no such workload")
    assert baseline.check("rms-norm", ["v6e"], ["llama-3-8b-4096"], []).worse == ()
    baseline.update("rms-norm", ["v6e"], ["llama-3-8b-4096"], ["forward"])
    assert "llama-2-4096/forward/v6e" not in baseline.read("rms-norm")["numbers"]
    assert baseline.check("rms-norm", ["v6e"], [], []).worse == ()


def test_what_is_not_recorded_is_told(recorded):
    recorded({KEY: NUMBERS})
    result = baseline.check("rms-norm", ["v6e", "v5e"], ["llama-3-8b-4096"], ["forward"])
    assert (result.worse, result.compared) == ((), 5)
    assert f"{result.unrecorded} workloads (by op and target) are not recorded" in result.text()
    assert result.unrecorded >= 1


@pytest.mark.parametrize(
    ("was", "now", "worse"),
    [
        ("no estimate", "refused", True),
        ("no estimate", "crashed", True),
        ("compiled", "no estimate", True),
        ("no estimate", "compiled", False),
        ("refused", "no estimate", False),
    ],
)
def test_losing_a_status_is_worse(was, now, worse):
    found = baseline.compare({KEY: {"status": was}}, {KEY: {"status": now}})
    line = f"{KEY}: was {was}, now {now}"
    assert (found.worse, found.better) == (((line,), ()) if worse else ((), (line,)))


@pytest.mark.parametrize("status", ["crashed", "timed out"])
def test_what_crashed_or_ran_out_of_time_is_not_recorded(recorded, status):
    recorded({KEY: NUMBERS})[KEY] = {"status": status}
    with pytest.raises(ValueError, match=f"nothing is recorded: {KEY} {status}; try again with a longer --timeout"):
        baseline.update("rms-norm", ["v6e"], ["llama-3-8b-4096"], ["forward"])
    assert baseline.read("rms-norm")["numbers"] == {KEY: NUMBERS}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"numbers": []}', '{"numbers": {"a/b/v6e": 7}}', '{"numbers": {}}'])
def test_a_broken_baseline_is_told(tmp_path, monkeypatch, text):
    monkeypatch.setattr(baseline, "FOLDER", tmp_path)
    (tmp_path / "rms-norm.json").write_text(text)
    for command in (baseline.check, baseline.update):
        with pytest.raises(ValueError, match=r"rms-norm\.json is not a baseline; restore it, or delete it"):
            command("rms-norm", ["v6e"], [], [])


def tuned(case):
    return tuning.Tuned(Workload("forward", case), USE, False, 40.0, 50.0, 2, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no file of tuned blocks"),
        ("[]", "is no file of tuned blocks"),
        ('{"kernel": "rms-norm", "device": "TPU v6 lite", "entries": [7]}', "is no file of tuned blocks"),
        ('{"kernel": "ragged-dot", "device": "TPU v6 lite", "entries": []}', "is for ragged-dot on TPU v6 lite"),
        ('{"kernel": "rms-norm", "device": "TPU v5", "entries": []}', "is for rms-norm on TPU v5"),
    ],
)
def test_tuned_blocks_are_not_merged_into_something_else(tmp_path, text, words):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        tuning.write("rms-norm", "v6e", [tuned("llama-3-8b-64")], path)
    assert path.read_text() == text


def test_two_commands_at_once_lose_nothing(tmp_path):
    """Each adds one workload to the same file; a reader meanwhile never sees half a file."""
    path = tmp_path / "tuning" / "tpu_v6e.json"
    cases = [workload.case for workload in baseline.choose_workloads("rms-norm", [], ["forward"])][:12]
    threads = [threading.Thread(target=tuning.write, args=("rms-norm", "v6e", [tuned(case)], path)) for case in cases]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert json.loads(path.read_text())["entries"]
    sizes = {(entry["when"]["m"], entry["when"]["n"], entry["when"]["residual"], entry["when"]["dtype"])
             for entry in json.loads(path.read_text())["entries"]}  # fmt: skip
    module = tuning.kernel_programs("rms-norm")
    wanted = [module.sizes("forward", case) for case in cases]
    assert sizes == {(size["m"], size["n"], size["residual"], size["dtype"]) for size in wanted}
    assert os.listdir(path.parent) == [path.name]


def test_one_at_a_time(tmp_path):
    inside, most = [], []

    def enter():
        with alone_in(tmp_path):
            inside.append(1)
            time.sleep(0.005)
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20


def test_a_write_that_fails_leaves_the_old_text_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "half \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]
    link = tmp_path / "link.json"
    link.symlink_to(path)
    replace_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_where_nothing_can_be_written_is_told(tmp_path):
    check_writable(tmp_path / "new" / "deeper" / "a.json", "--out")
    with pytest.raises(ValueError, match="--json takes a file; got the folder"):
        check_writable(tmp_path, "--json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--json takes a file in a folder that can be written to; got .*file can't"):
        check_writable(tmp_path / "file" / "a.json", "--json")


GOOD = {"status": "compiled", "pieces": 0, "kernels": []}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "7", "[" * 100_000, '{"status": 7}', '{"status": "compiled"}', '{"status": "refused"}',
     '{"status": "compiled", "pieces": 1, "kernels": 7}', '{"status": "compi'],
)  # fmt: skip
def test_a_damaged_cache_file_is_compiled_again(tmp_path, text):
    (tmp_path / "key.json").write_text(text)
    assert runner._cached(tmp_path, "key", lambda: GOOD) == GOOD | {"cached": False}
    assert runner._cached(tmp_path, "key", lambda: pytest.fail("cached")) == GOOD | {"cached": True}


def test_a_cache_that_is_no_folder_costs_time_only(tmp_path):
    (tmp_path / "file").write_text("")
    assert runner._cached(tmp_path / "file", "key", lambda: GOOD) == GOOD | {"cached": False}


@pytest.mark.parametrize(
    "result",
    [
        {"status": "timed out", "reason": "no answer from the compiler within 3 s"},
        {"status": "crashed", "reason": "the process was killed (out of memory?)"},
        {"status": "crashed", "reason": "the process was killed (signal 15)"},
        {"status": "crashed", "reason": "exit code 1: No module named 'libtpu'"},
        {"status": "no estimate", "reason": "the compiler's dump aborts: exit code 1: x", "pieces": 0},
        {"status": "refused", "error": "OSError: [Errno 28] No space left on device"},
        {"status": "refused", "error": "MemoryError: "},
        {"status": "no estimate", "pieces": 0, "reason": "signal 6: Check failed: tsl::WriteStringToFile( env, path"},
    ],
)
def test_what_may_be_the_machines_fault_is_not_remembered(tmp_path, result):
    assert runner._cached(tmp_path, "key", lambda: result)["status"] == result["status"]
    assert runner._cached(tmp_path, "key", lambda: GOOD)["status"] == "compiled"


def key(function):
    return runner._key(Job("v6e", {"function": function, "args": ["f32[8]"], "static": {}}), "bundles")


def test_the_key_of_a_module_function_depends_on_its_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "a_module_of_mine.py"
    source.write_text("def f(x):\n    return x\n")
    first = key("a_module_of_mine:f")
    source.write_text("def f(x):\n    return x + 1\n")
    assert key("a_module_of_mine:f") != first


def test_an_editors_lock_beside_the_source_is_no_source(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text("def f(x):\n    return x\n")
    first = key(f"{source}:f")
    (tmp_path / ".#mine.py").symlink_to("nobody@nowhere:1")
    assert key(f"{source}:f") == first


def test_the_key_of_a_kernel_depends_on_what_is_linked_into_it():
    moe = {path.name for path in runner._sources_in(runner.kernel_folder("moe-experts"))}
    dot = {path.name for path in runner.kernel_folder("ragged-dot").glob("*.py")}
    assert dot <= moe
