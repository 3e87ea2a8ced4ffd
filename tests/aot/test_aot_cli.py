"""The command: mistakes in one line, tables, pages and JSON; the compiler's answers are given here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from pallas_hub.bench.aot import kernels
from pallas_hub.bench.aot import runner as runner_module
from pallas_hub.bench.aot.program import parse_argument
from pallas_hub.bench.aot.programs import kernel_programs
from pallas_hub.cli import main

KERNELS = str(Path(__file__).with_name("aot_kernels.py"))
CODE = {
    "bundles": 100,
    "conditional": 7,
    "matmul": 50,
    "matmul_slots": 200,
    "spills": 3,
    "fills": 4,
    "unknown_loops": 0,
    "once": 0,
}


def answer(bundles=100, **changes):
    """What a worker sends: one kernel of 375 steps that moves 800 MB, and one XLA operation."""
    code = CODE | {"bundles": bundles}
    return {
        "status": "compiled", "seconds": 1.0, "pieces": 1, "cached": False,
        "kernels": [{"name": "k", "vmem_bytes": 5 << 20, "whole": code, "step": code}],
        "traffic": [{
            "kernel": "k", "steps": 375, "bytes": 800_000_000, "fill_bytes": 1_640_000, "vmem_limit_bytes": 48 << 20
        }],
        "xla": [{"name": "fusion", "opcode": "fusion", "cycles": 1750, "hbm_bytes": 820_000}],
        **changes,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """The command puts the folder of a user's file on the path of its process, which here is the tests'."""
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.fixture
def compiled(monkeypatch):
    """Answers by (impl, block_n); anything else gets the default one."""
    answers = {}

    def run_jobs(jobs, *, on_done=None, **options):
        results = []
        for job in jobs:
            blocks = job.program["blocks"] or {}
            results.append(answers.get((job.program["impl"], blocks.get("block_n")), answer()))
            on_done(job, results[-1])
        return results

    monkeypatch.setattr(kernels, "run_jobs", run_jobs)
    monkeypatch.setattr(kernels, "require_libtpu", lambda: None)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    return answers


COMMAND = ["aot", "ragged-dot", "--workload", "qwen3-30b-a3b-gate-up-t64", "--op", "forward", "--target", "v6e"]


def test_table_heads_columns_by_how_they_were_got(compiled, capsys):
    assert main(COMMAND) == 0
    out, err = capsys.readouterr()
    groups, names, row = out.splitlines()[3:6]
    assert groups.split() == ["compiled", "counted", "modelled"]
    places = [groups.index(group) for group in groups.split()]
    assert places[0] <= names.index("VMEM MiB") < names.index("spill/fill") < places[1]
    assert places[1] <= names.index("steps ") < names.index("x least") < places[2]
    # 800 MB at 1640 GB/s, and 1 us of fill; 1750 cycles at 1.75 GHz around it.
    assert [row.split()[i] for i in (-5, -4, -3, -2)] == ["488.8", "1.00", "489.8", "HBM"]
    assert "100 (7?)" in row
    assert "5.0/48" in row
    assert "[1/1] qwen3-30b-a3b-gate-up-t64 forward ours" in err


def test_peers_stand_at_our_blocks_and_at_their_best(compiled, capsys):
    compiled["jax", 512] = answer(bundles=9000)  # ours: 128 x 2048 x 512
    assert main([*COMMAND, "--vs", "jax"]) == 0
    out = capsys.readouterr().out
    assert "megablox, our blocks" in out
    assert "megablox, best of 3" in out
    ours, same, best = out.splitlines()[5:8]
    assert same.split()[-2] == "compute"
    assert (ours.split()[-2], best.split()[-2]) == ("HBM", "HBM")


def test_what_does_not_compile_is_a_row_with_the_reason(compiled, capsys):
    refused = {"status": "refused", "reason": "needs 64M of VMEM, the limit is 48M", "error": "..."}
    compiled["ours", 512] = refused
    assert main(COMMAND) == 1
    out = capsys.readouterr().out
    assert "v6e ours: refused: needs 64M of VMEM, the limit is 48M" in out


def test_no_estimate_is_not_a_failure(compiled, capsys):
    compiled["ours", 512] = {"status": "no estimate", "reason": "the compiler's dump aborts: signal 6", "traffic": []}
    assert main(COMMAND) == 0
    assert "no estimate: the compiler's dump aborts: signal 6" in capsys.readouterr().out


def test_json_and_html(compiled, capsys, tmp_path):
    assert main([*COMMAND, "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 0
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (row["impl"], row["target"], row["bytes"]) == ("ours", "v6e", 800_000_000)
    assert row["blocks"] == kernel_programs("ragged-dot").own_blocks("forward", "qwen3-30b-a3b-gate-up-t64", "v6e")
    assert row["kernels"][0]["step_bundles"] == 100
    page = (tmp_path / "r.html").read_text()
    assert "<td>100 (7?)</td>" in page
    assert "modelled" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["aot", "softmax"], "no compile report for kernel 'softmax'; there are reports for: rms-norm, ragged-dot"),
        (["aot", "rms-norm", "--workload", "gpt"], "rms-norm has no workload 'gpt'; there are: qwen3-30b-a3b-1,"),
        (["aot", "rms-norm", "--op", "sideways"], "rms-norm has no op 'sideways'; there are: forward, backward"),
        (["aot", "rms-norm", "--target", "v9"], "target must be one of v5e, v5p, v6e, tpu7x; got 'v9'"),
        (["aot", "rms-norm", "--vs", "tokamax"], "--vs for rms-norm must be among xla; got 'tokamax'"),
        (["aot", "rms-norm", "--arg", "f32[8]"], "--arg goes with path/to/file.py:function"),
        (["aot", "rms-norm", "--check", "--shape", "m=1,n=1"], "--check and --update go with --workload"),
        (["aot", "nowhere.py:f"], "there is no file"),
        (["aot", f"{KERNELS}:nothing"], "has no function 'nothing'"),
        (["aot", f"{KERNELS}:add_one", "--arg", "8x128"], "write dtype[shape], for example bf16[512,2048]"),
        (["aot", f"{KERNELS}:add_one", "--arg", "int5[8]"], "unknown dtype 'int5'; try one of bf16,"),
        (["aot", f"{KERNELS}:add_one", "--vs", "xla"], "go with a kernel of this project"),
        (["tune", "rms-norm", "--target", "v9"], "target must be one of v5e, v5p, v6e, tpu7x; got 'v9'"),
    ],
)
def test_mistakes_are_told_in_one_line(command, words, monkeypatch, capsys):
    for module in (runner_module, kernels):
        monkeypatch.setattr(module, "require_libtpu", lambda: None)
    assert main(command) == 1
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit(0)", "importing it failed: SystemExit: 0"),
        ("raise RuntimeError('boom')", "importing it failed: RuntimeError: boom"),
        ("def f(:", "importing it failed: SyntaxError: invalid syntax"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
    ],
)
def test_a_file_that_fails_at_import_is_told_in_one_line(text, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner_module, "require_libtpu", lambda: None)
    (tmp_path / "mine.py").write_text(text)
    assert main(["aot", f"{tmp_path}/mine.py:f"]) == 1
    out, err = capsys.readouterr()
    assert words in err
    assert (out, err.count("\n")) == ("", 1)


def test_what_a_file_prints_at_import_is_not_in_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner_module, "require_libtpu", lambda: None)
    monkeypatch.setattr(runner_module, "run_jobs", lambda jobs, **_: [{"status": "refused", "reason": "no"}])
    (tmp_path / "json.py").write_text("print('here I am')\ndef f(x):\n    return x\n")
    assert main(["aot", f"{tmp_path}/json.py:f", "--arg", "f32[8]", "--target", "v6e", "--json", "-"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["reason"] == "no"
    assert "here I am" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json", "{folder}"], "--json takes a file; got the folder {folder}."),
        (["--html", "{folder}"], "--html takes a file; got the folder {folder}."),
        (["--json", "-", "--html", "-"], "--json - and --html - would print both to one place"),
        (["--check", "--json", "-"], "--vs, --json and --html do not go with --check and --update"),
        (["--update", "--vs", "jax"], "--vs, --json and --html do not go with --check and --update"),
    ],
)
def test_outputs_are_checked_before_anything_is_compiled(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "run_jobs", lambda *_, **__: pytest.fail("compiled"))
    assert main([*COMMAND, *(option.format(folder=tmp_path) for option in options)]) == 1
    assert words.format(folder=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "--out takes a file; got the folder"), ("{", "is no file of tuned blocks; delete it, or give another")],
)
def test_where_tune_can_not_write_is_told_before_anything_is_compiled(text, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "run_jobs", lambda *_, **__: pytest.fail("compiled"))
    out = tmp_path / "out"
    out.mkdir() if text is None else out.write_text(text)
    assert main(["tune", *COMMAND[1:], "--out", str(out)]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9"])
@pytest.mark.parametrize("command", [COMMAND, ["tune", *COMMAND[1:]]])
def test_no_time_limit_is_told(command, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--timeout", value])
    assert f"--timeout: must be more than 0 and at most 86400 seconds; got {value}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--workload", "--target", "--op", "--vs"])
def test_no_name_is_not_every_name(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["aot", "ragged-dot", option, " , "])
    assert f"{option}: takes names with commas between them; got ' , '" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rms_norm", "pallas-hub/rms-norm", "pallas-hub/rms_norm@1"])
@pytest.mark.parametrize("command", ["aot", "tune"])
def test_other_spellings_of_a_kernel_are_understood(command, name, capsys):
    assert main([command, name, "--target", "v6e", "--workload", "nowhere"]) == 1
    assert f"pallas-hub {command}: rms-norm has no workload 'nowhere'; there are: " in capsys.readouterr().err


def test_sizes_without_blocks_say_what_runs(compiled, capsys):
    main(["aot", "moe-experts", "--target", "v6e", "--workload", "gpt-oss-20b-t4096"])
    assert "no blocks: these sizes run as two ragged dots, which choose their own" in capsys.readouterr().out


def test_a_name_given_twice_counts_once_and_a_page_can_be_printed(compiled, capsys):
    assert main([*COMMAND, "--target", "v6e,v6e", "--html", "-"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("<!doctype html>")
    assert out.count("<tr class=ours>") == 1


def test_arguments(tmp_path):
    import numpy as np

    parsed = parse_argument("bf16[512,2048]")
    assert (parsed.shape, str(parsed.dtype)) == ((512, 2048), "bfloat16")
    assert parse_argument("f32[]").shape == ()
    np.save(tmp_path / "sizes.npy", np.arange(4, dtype=np.int32))
    assert parse_argument(str(tmp_path / "sizes.npy")).tolist() == [0, 1, 2, 3]


def test_tune_writes_the_best_blocks(compiled, tmp_path, monkeypatch, capsys):
    from pallas_hub.bench.aot import tuning

    monkeypatch.setattr(tuning, "require_libtpu", lambda: None)
    less = [answer()["traffic"][0] | {"bytes": 700_000_000}]
    compiled["ours", 1536] = answer(traffic=less)
    compiled["ours", 768] = {"status": "refused", "reason": "needs 64M of VMEM", "error": "..."}
    out = tmp_path / "tuning" / "tpu_v6e.json"
    command = ["tune", *COMMAND[1:], "--out", str(out)]
    assert main(command) == 0
    printed, progress = capsys.readouterr()
    (entry,) = json.loads(out.read_text())["entries"]
    assert entry["use"]["block_n"] == 1536
    assert entry["when"] == {"op": "forward", "dtype": "bfloat16", "m": 512, "k": 2048, "n": 1536, "g": 128}
    assert entry["gain"] == pytest.approx(488.8 / 427.8 - 1, abs=1e-3)
    assert "gain 14.3%" in printed
    assert "needs 64M of VMEM" in progress
    # Once more, with a kernel that has become as good by default: the entry goes, and with the last one the file.
    assert main([*command, "--limit", "1"]) == 0
    assert "the defaults are best: there is nothing to write" in capsys.readouterr().out
    assert not out.exists()


def test_shapes_of_the_users_own(compiled, capsys):
    shapes = [
        "--shape",
        "m=4096,n=5120",
        "--shape",
        "m=64,n=5120,residual,float32",
        "--target",
        "v6e",
        "--op",
        "forward",
    ]
    assert main(["aot", "rms-norm", *shapes, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["case"], row["op"]) for row in rows] == [
        ("m=4096,n=5120", "forward"),
        ("m=64,n=5120,residual,float32", "forward"),
    ]
    assert [row["least_bytes"] for row in rows] == [
        2 * 4096 * 5120 * 2 + 5120 * 2,
        4 * 64 * 5120 * 4 + 5120 * 4,
    ]


def test_options_may_be_given_again(compiled, capsys):
    again = [
        "--workload",
        "qwen3-30b-a3b-down-t1",
        "--op",
        "backward-lhs",
        "--target",
        "v5e",
        "--vs",
        "xla",
        "--vs",
        "jax",
    ]
    assert main([*COMMAND, *again]) == 0
    out = capsys.readouterr().out
    for case in ("qwen3-30b-a3b-gate-up-t64", "qwen3-30b-a3b-down-t1"):
        for op in ("forward", "backward-lhs"):
            assert f"{case}  {op}\n" in out
    for word in ("v6e ", "v5e ", "megablox", "XLA"):
        assert f"\n{word}" in out or f" {word}" in out


def test_a_shape_joins_named_workloads_and_peers(compiled, capsys):
    shape = ["--shape", "m=512,k=2048,n=1536,g=128"]
    assert main([*COMMAND, *shape, "--vs", "xla"]) == 0
    out = capsys.readouterr().out
    assert "qwen3-30b-a3b-gate-up-t64  forward" in out
    table = out[out.index("m=512,k=2048,n=1536,g=128  forward") :]
    assert [line.split()[1] for line in table.splitlines()[3:5]] == ["ours", "XLA"]
    assert "rows go to groups at random (seed 0): 123 of 128 have some" in table


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ("m=4096", "no n"),
        ("4096x5120", "'4096x5120' is unknown"),
        ("m=4096,n=5120,k=1", "'k=1' is unknown"),
        ("m=4096,n=5120,n=5120", "n is there twice"),
        ("m=4096,n=0", "n must be from 1 to 4194304"),
        ("m=4096,n=-5", "n must be from 1 to 4194304"),
        ("m=9999999999999999999999,n=1", "m must be from 1 to 4194304"),
        ("", "'' is unknown"),
    ],
)
def test_a_wrong_shape_is_told_with_the_letters_and_an_example(compiled, shape, fault, capsys):
    assert main(["aot", "rms-norm", "--shape", shape]) == 1
    err = capsys.readouterr().err
    assert "rms-norm: --shape takes m, n, and if wanted residual, zero_centered, float32_scale, float32" in err
    assert f"as in m=4096,n=5120; got {shape!r}: {fault}." in err
    assert main(["tune", "ragged-dot", "--target", "v6e", "--shape", "m=8,n=8"]) == 1
    assert "ragged-dot: --shape takes m, k, n, g, as in m=512,k=2048,n=1536,g=128; got" in capsys.readouterr().err
