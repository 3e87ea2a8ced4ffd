"""Worker processes: what happens to a program that aborts, hangs, is refused, or was compiled before."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu", reason="skipped: needs libtpu, the TPU compiler")

import aot_kernels  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pallas_hub.bench.aot import compile_report, runner  # noqa: E402
from pallas_hub.bench.aot.report import build_report  # noqa: E402
from pallas_hub.bench.aot.runner import Job, plain_reason, run_jobs  # noqa: E402
from pallas_hub.bench.aot.table import report_text  # noqa: E402
from pallas_hub.bench.aot.workers import Stopped, Workers, _last_words  # noqa: E402

KERNELS = str(Path(__file__).with_name("aot_kernels.py"))


def job(function, *args, target="v6e", **static):
    return Job(target, {"function": f"{KERNELS}:{function}", "args": list(args), "static": static}, {}, function)


def run(tmp_path, *jobs, **options):
    return run_jobs(jobs, workers=1, cache=tmp_path, **options)


def test_compiled_program_has_code_traffic_and_surroundings(tmp_path):
    wanted = job("add_one", "f32[256,512]", pad=True)
    (result,) = run(tmp_path, wanted)
    assert result["status"] == "compiled", result
    report = build_report(wanted, result)
    (kernel,) = report.kernels
    assert (kernel.name, kernel.steps, kernel.bytes) == ("add_one", 4, 2 * 256 * 512 * 4)
    assert kernel.step_bundles > 0
    assert kernel.spills == kernel.fills == 0
    assert 0 < kernel.vmem_bytes < kernel.vmem_limit_bytes
    assert report.xla_operations >= 2  # the sine before and the cosine after
    # Each reads and writes the array once: at 1640 GB/s that is the least they can take.
    assert report.xla_us >= 2 * (2 * 256 * 512 * 4) / 1640e3
    assert report.time_us == pytest.approx(report.kernel_us + report.xla_us)


def test_library_takes_any_callable_and_values(tmp_path):
    """Traced here and compiled there: a closure, a table given as values, and operations on both sides."""
    table = np.array([2, 2, 0, 1], np.int32)

    def program(table, count, x):
        return jnp.tanh(aot_kernels.gather_blocks(table, count, jnp.sin(x)))

    args = [table, np.int32(4), jax.ShapeDtypeStruct((1024, 128), jnp.float32)]
    report = compile_report(program, args, label="mine", least_bytes=1 << 20, cache=tmp_path)
    assert (report.label, report.target, report.status) == ("mine", "v6e", "compiled")
    (kernel,) = report.kernels
    assert (kernel.name, kernel.steps, kernel.bytes) == ("gather_blocks", 4, (3 + 4) * 8 * 128 * 4)
    assert report.xla_operations >= 2
    assert report.roofline_us == pytest.approx((1 << 20) / 1640e3)
    again = compile_report(program, args, target=["v6e"], cache=tmp_path)
    assert [one.cached for one in again] == [True]


def test_library_refuses_an_unknown_target():
    with pytest.raises(ValueError, match="target must be one of v5e, v5p, v6e, tpu7x; got 'v9'"):
        compile_report(aot_kernels.add_one, [jax.ShapeDtypeStruct((8, 128), "float32")], target="v9")


def test_library_says_what_a_function_takes():
    one = jax.ShapeDtypeStruct((8, 128), "float32")
    message = r"^compile_report: add\(x, y\) must take what args and options hold; got 1 arrays, z: .*\.$"

    def add(x, y):
        return x + y

    with pytest.raises(TypeError, match=message):
        compile_report(add, [one], z=3)


def test_second_run_comes_from_the_cache(tmp_path):
    wanted = job("add_one", "f32[64,128]")
    (first,) = run(tmp_path, wanted)
    started = time.perf_counter()
    (second,) = run(tmp_path, wanted)
    assert time.perf_counter() - started < 1
    assert (first["cached"], second["cached"]) == (False, True)
    assert second["kernels"] == first["kernels"]


def test_key_depends_on_source_shape_and_target(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text("def f(x):\n    return x\n")

    def key(args=("f32[8]",), target="v6e"):
        return runner._key(Job(target, {"function": f"{source}:f", "args": list(args), "static": {}}), "bundles")

    keys = [key(), key(args=("f32[16]",)), key(target="v5e")]
    source.write_text("def f(x):\n    return x + 1\n")
    keys.append(key())
    assert len(set(keys)) == 4


def test_abort_becomes_a_row_with_its_reason(tmp_path):
    wanted = job("kills_the_process", "f32[8,128]")
    (result,) = run(tmp_path, wanted)
    assert result["status"] == "crashed"
    assert "signal 6" in result["reason"]
    assert "v6e crashed: signal 6" in report_text([build_report(wanted, result)])


def test_abort_of_the_dump_only_is_no_estimate_not_broken(tmp_path, monkeypatch):
    real = Workers.run

    def aborting(self, job, *, dump, timeout_s):
        if dump == "nothing":
            return real(self, job, dump=dump, timeout_s=timeout_s)
        return {"status": "crashed", "reason": "signal 6: Check failed: found hlo_deduplication_map"}

    monkeypatch.setattr(Workers, "run", aborting)
    (result,) = run(tmp_path, job("add_one", "f32[64,128]"))
    assert result["status"] == "no estimate"
    assert result["reason"].startswith("the compiler's dump aborts: signal 6")
    assert result["traffic"][0]["bytes"] == 2 * 64 * 128 * 4  # what was counted stays


def test_a_killed_process_is_no_abort_of_the_dump(tmp_path, monkeypatch):
    """It says nothing of the kernel: neither that it compiles without an estimate, nor anything to remember."""
    killed = {"status": "crashed", "reason": "the process was killed (out of memory?)"}
    monkeypatch.setattr(Workers, "run", lambda self, job, **_: killed)
    (result,) = run(tmp_path, job("add_one", "f32[64,128]"))
    assert result == killed | {"cached": False}
    assert not list(tmp_path.glob("*.json"))


@pytest.fixture
def started(monkeypatch):
    """Every worker process that is started."""
    workers, real = [], Workers._start
    monkeypatch.setattr(Workers, "_start", lambda self, dump: workers.append(real(self, dump)) or workers[-1])
    return workers


def test_one_process_serves_many_programs_and_is_gone_afterwards(tmp_path, started):
    jobs = [job("add_one", f"f32[{rows},128]", target=t) for rows in (64, 128) for t in ("v5e", "v6e", "tpu7x")]
    results = run(tmp_path, *jobs)
    assert [result["status"] for result in results] == ["compiled"] * 6
    assert [result["traffic"][0]["steps"] for result in results] == [1, 1, 1, 2, 2, 2]
    assert all(result["kernels"][0]["name"] == "add_one" for result in results)
    (worker,) = started
    assert worker.served == 6
    assert worker._process.poll() is not None
    assert not Path(worker._folder.name).exists()


def test_a_worker_that_served_others_gives_the_same_numbers(tmp_path):
    jobs = [job("matmul", "bf16[512,256]", "bf16[256,256]"), job("add_one", "f32[256,128]")]
    together = run(tmp_path / "together", *jobs)
    alone = [run(tmp_path / "alone", one)[0] for one in reversed(jobs)][::-1]
    assert [(r["kernels"], r["traffic"]) for r in together] == [(r["kernels"], r["traffic"]) for r in alone]


def test_abort_and_exit_leave_the_others_alone(tmp_path, started):
    names = ["add_one", "kills_the_process", "matmul", "exits", "add_one"]
    args = {"matmul": ["bf16[128,128]", "bf16[128,128]"]}
    results = run(tmp_path, *(job(name, *args.get(name, ["f32[8,128]"]), target="v6e") for name in names))
    assert [result["status"] for result in results] == ["compiled", "crashed", "compiled", "crashed", "compiled"]
    assert "signal 6" in results[1]["reason"]
    assert results[3]["reason"] == "exit code 1: enough"


def test_abort_in_a_used_process_is_tried_once_more_in_a_new_one(tmp_path, started):
    jobs = [job("kills_a_used_process", f"f32[{rows},128]") for rows in (8, 16, 24)]
    assert [result["status"] for result in run(tmp_path, *jobs)] == ["compiled"] * 3
    assert len(started) == 3


def test_what_traced_code_prints_is_no_answer(tmp_path):
    (result,) = run(tmp_path, job("prints", "f32[8,128]"))
    assert result["status"] == "compiled"


def test_what_a_program_forks_answers_nothing_and_does_not_stay(tmp_path, started):
    """Else its answer would be taken for that of the next program."""
    jobs = [job("forks", "f32[64,128]"), job("add_one", "f32[128,128]"), job("forks_and_aborts", "f32[8,128]")]
    results = run(tmp_path, *jobs, timeout_s=60)
    assert [result["status"] for result in results] == ["compiled", "compiled", "crashed"]
    assert [result["traffic"][0]["bytes"] for result in results[:2]] == [2 * 64 * 128 * 4, 2 * 128 * 128 * 4]
    assert "signal 6" in results[2]["reason"]
    for worker in started:
        assert not _runs(worker._process.pid)


def _runs(group):
    """Is anything of this process group left, that has not ended and only waits to be asked for its exit code?"""
    found = subprocess.run(["ps", "-e", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(line.split()[0] == str(group) and "Z" not in line.split()[1] for line in found.splitlines())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_command_leaves_no_worker_and_no_folder(tmp_path, number):
    """The workers hang, so that they don't notice by themselves that nobody waits for their answer."""
    command = [sys.executable, "-m", "pallas_hub", "aot", f"{KERNELS}:never_returns", "--arg", "f32[8,128]"]
    environment = os.environ | {
        "PALLAS_HUB_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TMPDIR": str(tmp_path),
    }
    # What runs the tests may be in the background of a shell, which makes it, and all that it starts, ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([*command, "--target", "v6e"], env=environment)
    finally:
        signal.signal(signal.SIGINT, before)

    def workers():
        return [path for path in tmp_path.glob("pallas-hub-worker-*") if any(path.glob("pallas-hub-aot-*"))]

    _wait_until(workers)
    assert len(_started_under(tmp_path)) == 2
    time.sleep(1)
    process.send_signal(number)
    process.wait(timeout=30)
    _wait_until(lambda: not list(tmp_path.glob("pallas-hub-*")))
    _wait_until(lambda: not _started_under(tmp_path))


def _started_under(folder):
    """Processes whose environment names the folder; one that has ended has no environment any more."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if str(folder).encode() in path.read_bytes() else []
    return found


def _wait_until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_file_called_jax_in_the_working_folder_is_not_jax(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    (result,) = run(tmp_path / "cache", job("add_one", "f32[64,128]"))
    assert result["status"] == "compiled", result


def test_a_module_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "a_module_in_the_folder.py").write_text("def f(x):\n    return x + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    named = {"function": "a_module_in_the_folder:f", "args": ["f32[64,128]"], "static": {}}
    (result,) = run(tmp_path / "cache", Job("v6e", named, {}, "f"))
    assert result["status"] == "compiled", result


def test_closed_workers_stop_what_they_do(started):
    with Workers() as workers:
        threading.Timer(3, workers.close).start()
        asked = {"target": "v6e", "options": {}, "program": job("never_returns", "f32[8,128]").program}
        with pytest.raises(Stopped):
            workers.run(asked, dump="bundles", timeout_s=100)
        with pytest.raises(Stopped):
            workers.run(asked, dump="bundles", timeout_s=100)
    assert [worker._process.poll() for worker in started] == [-9]


def test_time_limit_becomes_a_row_and_is_not_remembered(tmp_path):
    wanted = job("never_returns", "f32[8,128]")
    (result,) = run(tmp_path, wanted, timeout_s=8)
    assert (result["status"], result["reason"]) == ("timed out", "no answer from the compiler within 8 s")
    assert "timed out: no answer from the compiler within 8 s" in report_text([build_report(wanted, result)])
    assert not list(tmp_path.glob("*.json"))


def test_too_much_vmem_is_refused_in_plain_words(tmp_path):
    (result,) = run(tmp_path, job("too_large", "f32[8,128]"))
    assert result["status"] == "refused"
    assert "of VMEM, the limit is 32.00M: smaller blocks, or a higher vmem_limit_bytes" in result["reason"]


def test_interrupted_what_has_not_begun_never_does(tmp_path, monkeypatch):
    begun = []

    def interrupted(job, cache, timeout_s, processes):
        begun.append(job.label)
        if len(begun) == 1:
            raise KeyboardInterrupt
        time.sleep(0.05)
        return {}

    monkeypatch.setattr(runner, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *(job("add_one", f"f32[{8 * i},128]") for i in range(1, 100)))
    assert len(begun) < 99


@pytest.mark.parametrize(
    ("code", "stderr", "words"),
    [
        (
            -6,
            "W1130 noise\nF1130 16:59:45.278776   10647 llo_dumper.cc:1778] Profiling failed: why\n*** Aborted",
            "signal 6: Profiling failed: why",
        ),
        (-6, "x.cc:7: Check failed: a == b (1 vs. 2)\n@ 0x7f", "signal 6: Check failed: a == b (1 vs. 2)"),
        (1, "Traceback\nValueError: no\n", "exit code 1: ValueError: no"),
        (3, "", "exit code 3: no message"),
        (-9, "anything", "the process was killed (out of memory?)"),
        (-15, "anything", "the process was killed (signal 15)"),
        (-2, "KeyboardInterrupt", "the process was killed (signal 2)"),
    ],
)
def test_last_words(code, stderr, words):
    assert _last_words(code, stderr) == words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("MosaicError: E2003: CompileTimeMosaicUnprovenMemoryAccessAlignment: cannot", "use pl.multiple_of"),
        (
            "ValueError: requires that the last two dimensions of your block shape are divisible by 8 and 128 resp.",
            "must be multiples of 8 and 128, or span the whole array",
        ),
        (
            "MosaicError: Not implemented: Multiple source vregs along gather dimension",
            "lacks it: Not implemented: Mul",
        ),
        ("X: Used 256.00M of 127.94M vmem. Exceeded", "needs 256.00M of VMEM, there are 127.94M: smaller blocks"),
        ("TypeError: something else\nmore", "TypeError: something else"),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in vmem.\n\n" + "scoped " * 40 + "\n129.0M is taken",
            "129.0M is taken",
        ),
        ("X: " + "word " * 100, "word ..."),
    ],
)
def test_reasons(error, words):
    assert words in plain_reason(error)


def test_several_targets_and_two_processes_at_once(tmp_path):
    """Two commands on one cache: libtpu lets both in, and both get the same numbers."""
    command = [sys.executable, "-m", "pallas_hub", "aot", f"{KERNELS}:add_one", "--arg", "f32[64,128]"]
    command += ["--target", "v5e,v6e", "--workers", "2", "--json", "-"]
    environment = os.environ | {"PALLAS_HUB_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    reports = [json.loads(out) for out, _ in outputs]
    assert [report["target"] for report in reports[0]] == ["v5e", "v6e"]
    assert reports[0][0]["kernels"] == reports[1][0]["kernels"]
    assert all(report["kernels"][0]["bytes"] == 2 * 64 * 128 * 4 for report in reports[0])


def test_missing_libtpu_says_how_to_install_it(tmp_path):
    script = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'libtpu' else find(name, *a)\n"
        "from pallas_hub.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for what in (["rms-norm"], [f"{KERNELS}:add_one", "--arg", "f32[8,128]"]):
        ran = subprocess.run(
            [sys.executable, "-c", script, "aot", *what],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert ran.returncode == 1
        assert "the TPU compiler is in libtpu, which is not installed" in ran.stderr
        assert "pip install" in ran.stderr
        assert "Traceback" not in ran.stderr
