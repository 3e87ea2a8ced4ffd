"""The demo: its steps can fail, the first failure ends it, and the whole of it passes in a fresh process."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import types
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import pallas_hub
from pallas_hub import demo
from pallas_hub.bench.workloads import ragged_dot, rms_norm
from pallas_hub.cli import demo as command
from pallas_hub.demo import check_steps, use_steps
from pallas_hub.demo.state import require


def parse(*arguments):
    parser = argparse.ArgumentParser(prog="pallas-hub")
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *arguments])


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(demo, "_refuse_a_used_process", lambda: None)


def good(state, step):
    """Do something good."""
    step.facts["answer"] = 42


def bad(state, step):
    """Do something that fails its check."""
    require(1 > 2, "1 is not above 2")


def surprising(state, step):
    """Do something that raises."""
    raise KeyError("lost")


def test_all_steps_passing_is_exit_code_zero(fresh, monkeypatch, capsys):
    monkeypatch.setattr(demo, "STEPS", (good, good))
    assert command.run(parse()) == 0
    out = capsys.readouterr().out
    assert "[1/2] Do something good" in out
    assert "all steps passed" in out


@pytest.mark.parametrize(
    ("action", "words"), [(bad, "FAILED: 1 is not above 2"), (surprising, "FAILED: KeyError: 'lost'")]
)
def test_the_first_failure_ends_the_demo(fresh, monkeypatch, capsys, action, words):
    monkeypatch.setattr(demo, "STEPS", (good, action, good))
    assert command.run(parse()) == 1
    out = capsys.readouterr().out
    assert words in out
    assert "[3/3]" not in out
    assert "stopped" in out


def test_json_holds_the_facts_and_nothing_else_is_on_stdout(fresh, monkeypatch, capsys):
    monkeypatch.setattr(demo, "STEPS", (good, bad))
    assert command.run(parse("--json")) == 1
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["passed"] is False
    assert [step["passed"] for step in data["steps"]] == [True, False]
    assert data["steps"][0]["facts"] == {"answer": 42}
    assert data["steps"][1]["error"] == "1 is not above 2"
    assert "[1/2] Do something good" in captured.err


def test_missing_packages_are_named_before_the_first_step(monkeypatch, capsys):
    monkeypatch.setattr(command, "_NEEDS", ("json", "no_such_package", "nor_this_one"))
    assert command.run(parse()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not installed: no_such_package, nor_this_one. Run `make demo`" in captured.err


def test_a_process_that_knows_another_hub_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.ModuleType("huggingface_hub"))
    assert command.run(parse()) == 1
    assert "Run `pallas-hub demo` or call pallas_hub.demo.run() in a fresh process." in capsys.readouterr().err


def right_norm(x, weight, eps=1e-6):
    return rms_norm.exact_rms_norm(x, weight).to(x.dtype)


def right_experts(hidden, gate_up_proj, down_proj, index, weights):
    module = types.SimpleNamespace(gate_up_proj=gate_up_proj, down_proj=down_proj)
    return ragged_dot.torch_loop(module, hidden, index, weights)


def a_demo(norm=right_norm, experts=right_experts, path="torch"):
    """The demo's state with stand-ins for the loaded kernels, whose bridges say that `path` ran."""

    @contextlib.contextmanager
    def record_paths():
        yield [("op", path)]

    loaded = {}
    for name, functions in {"rms-norm": {"rms_norm": norm}, "ragged-dot": {"moe_experts": experts}}.items():
        kernel = types.ModuleType(f"demo_stand_in_{name.replace('-', '_')}")
        bridge = types.ModuleType(f"{kernel.__name__}._bridge")
        bridge.record_paths = record_paths
        vars(kernel).update(functions)
        sys.modules[kernel.__name__], sys.modules[bridge.__name__] = kernel, bridge
        loaded[name] = kernel
    return demo.Demo(
        lambda line: None, Path(), ExitStack(), kernels=loaded, workload="small", tokens=(2,), seconds=0.01
    )


def test_right_kernels_pass_the_check():
    step = demo.Step("check")
    check_steps.check_kernels(a_demo(), step)
    assert len(step.facts) == 8  # rms_norm and moe_experts, value and gradient, in two dtypes


@pytest.mark.parametrize(
    "wrong",
    [
        {"norm": lambda x, weight, eps: right_norm(x, weight) * 1.1},
        {"norm": lambda x, weight, eps: right_norm(x.detach(), weight) + 0 * x},  # right value, gradient zero
        {"experts": lambda *arguments: right_experts(*arguments) * 1.1},
        {"experts": lambda *arguments: right_experts(arguments[0].detach(), *arguments[1:]) + 0 * arguments[0]},
        {"experts": lambda *arguments: torch.full_like(arguments[0], float("nan")) + 0 * arguments[0]},
    ],
    ids=["norm", "norm-gradient", "experts", "experts-gradient", "nan"],
)
def test_a_wrong_kernel_fails_the_check(wrong):
    with pytest.raises(demo.StepFailed, match=r"error .* is above|result holds NaN"):
        check_steps.check_kernels(a_demo(**wrong), demo.Step("check"))


def test_a_pallas_kernel_that_did_not_run_fails_the_interpreted_check():
    with pytest.raises(demo.StepFailed, match=r"rms-norm: the Pallas kernel did not run; paths taken: \{'torch'\}"):
        check_steps.check_interpreted(a_demo(path="torch"), demo.Step("check"))
    assert "PALLAS_HUB_INTERPRET" not in os.environ
    check_steps.check_interpreted(a_demo(path="interpret"), demo.Step("check"))


def test_a_wrong_kernel_is_not_timed():
    step = demo.Step("time")
    with pytest.raises(demo.StepFailed, match="a check failed, see the table"):
        use_steps.time_layer(a_demo(experts=lambda *arguments: right_experts(*arguments) * 1.1), step)
    assert step.facts["passed"] is False


@pytest.mark.slow
def test_the_whole_demo_passes_in_a_fresh_process(tmp_path):
    """With a small layer to time; everything else as `make demo` runs it."""
    environ = {**os.environ, "PYTHONPATH": str(Path(pallas_hub.__file__).absolute().parents[1]), "HOME": str(tmp_path)}
    arguments = ["demo", "--workload", "small", "--tokens", "2", "--seconds", "0.2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "pallas_hub", *arguments], capture_output=True, text=True, env=environ, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    data = json.loads(done.stdout)
    assert data["passed"] is True
    assert len(data["steps"]) == len(demo.STEPS)
    facts = {name: value for step in data["steps"] for name, value in step["facts"].items()}
    assert facts["swapped"] > 0
    assert facts["logits_error"] < 1e-4
    assert list(tmp_path.iterdir()) == []  # nothing was left in the home folder
