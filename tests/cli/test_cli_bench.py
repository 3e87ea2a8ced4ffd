"""`pallas-hub bench`: options, exit codes, JSON, chart; on a stand-in kernel so that only the command is tested."""

import argparse
import builtins
import json
import os
import types

import pytest

from pallas_hub.bench import bridge_overhead, loading, runner
from pallas_hub.bench.workloads import ragged_dot
from pallas_hub.cli import bench as command
from pallas_hub.cli import main


def parse(*arguments):
    parser = argparse.ArgumentParser(prog="pallas-hub")
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


def right(hidden, gate_up_proj, down_proj, index, weights):
    module = types.SimpleNamespace(gate_up_proj=gate_up_proj, down_proj=down_proj)
    return ragged_dot.torch_loop(module, hidden, index, weights)


def wrong(*arguments):
    return right(*arguments) * 1.5


@pytest.fixture
def use_kernel(monkeypatch):
    """Let the command measure `moe_experts` in place of a loaded kernel."""
    asked = {}

    def install(moe_experts):
        kernel = types.ModuleType("kernel_stand_in")
        kernel.moe_experts = moe_experts

        def load_kernel(name, repo, source):
            asked.update(name=name, repo=repo, source=source)
            return kernel, "a stand-in"

        monkeypatch.setattr(loading, "load_kernel", load_kernel)
        return asked

    return install


QUICK = ("ragged-dot", "--workload", "small", "--tokens", "2", "--dtype", "float32", "--seconds", "0.01")


def test_table_has_all_rivals_and_exit_code_zero(use_kernel, capsys):
    asked = use_kernel(right)
    assert command.run(parse(*QUICK)) == 0
    out = capsys.readouterr().out
    for part in (
        "measured on CPU",
        "kernel a stand-in",
        "moe_experts (ours)",
        "Transformers eager",
        "torch loop",
        "of stream",
    ):
        assert part in out
    assert asked == {"name": "ragged-dot", "repo": None, "source": False}


def test_a_wrong_kernel_is_not_timed_and_the_exit_code_is_one(use_kernel, capsys):
    use_kernel(wrong)
    assert command.run(parse(*QUICK)) == 1
    out = capsys.readouterr().out
    assert "NOT TIMED moe_experts: check failed: error" in out
    assert "moe_experts (ours)" not in out
    assert "Transformers eager" in out


def test_json_is_the_only_thing_on_stdout(use_kernel, capsys):
    use_kernel(wrong)
    assert command.run(parse(*QUICK, "--json")) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is False
    assert data["machine"]["kernel"] == "a stand-in"
    rows = {row["implementation"]: row for row in data["cases"][0]["rows"]}
    assert rows["moe_experts"]["timing"] is None
    assert rows["torch loop"]["timing"]["repeats"] >= 5


def test_repo_and_source_reach_the_loader(use_kernel):
    asked = use_kernel(right)
    command.run(parse(*QUICK, "--repo", "me/mine"))
    assert asked["repo"] == "me/mine"
    command.run(parse(*QUICK, "--source"))
    assert asked["source"] is True


def test_plot_is_written(use_kernel, tmp_path):
    use_kernel(right)
    assert command.run(parse(*QUICK, "--plot", str(tmp_path / "bench.png"))) == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_titles_of_the_plot_are_not_cut_off(use_kernel, monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    outside = []

    def look(figure, path, **options):
        figure.draw_without_rendering()
        boxes = [axes.title.get_window_extent() for axes in figure.axes]
        outside.extend(box for box in boxes if box.x0 < 0 or box.x1 > figure.bbox.width)

    use_kernel(right)
    monkeypatch.setattr(Figure, "savefig", look)
    assert command.run(parse(*QUICK, "--plot", str(tmp_path / "bench.png"))) == 0
    assert not outside


def test_plot_without_matplotlib_is_refused_before_measuring(use_kernel, monkeypatch, capsys, tmp_path):
    use_kernel(right)
    real = builtins.__import__

    def without_matplotlib(name, *arguments, **keywords):
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    monkeypatch.setattr(runner, "run_case", lambda *a, **k: pytest.fail("measured before the plot was refused"))
    assert command.run(parse(*QUICK, "--plot", str(tmp_path / "bench.png"))) == 1
    assert "--plot needs matplotlib, which is not installed. Try `pip install matplotlib`" in capsys.readouterr().err


def test_an_unwritable_chart_is_one_line(use_kernel, capsys, tmp_path):
    use_kernel(right)
    assert command.run(parse(*QUICK, "--plot", str(tmp_path / "missing" / "bench.png"))) == 1
    assert "cannot write the chart to" in capsys.readouterr().err


def test_an_unknown_workload_lists_the_known_ones(use_kernel, capsys):
    use_kernel(right)
    assert command.run(parse("ragged-dot", "--workload", "gpt-9")) == 1
    assert "--workload must be one of small; got 'gpt-9'" in capsys.readouterr().err


def test_experts_that_do_not_fit_in_memory_are_refused(use_kernel, monkeypatch, capsys):
    use_kernel(right)
    monkeypatch.setattr(ragged_dot, "available_memory_bytes", lambda: 2**20)
    assert command.run(parse(*QUICK)) == 1
    assert "GiB of memory are free. Choose a smaller --workload or --dtype bfloat16." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax"], "invalid choice: 'softmax'"),
        (["ragged-dot", "--tokens", "0"], "must be at least 1; got 0"),
        (["ragged-dot", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
    ids=["kernel", "tokens", "dtype"],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert message in capsys.readouterr().err


def test_bridge_rows_are_shown(monkeypatch, capsys):
    row = bridge_overhead.Row((8, 8), "float32", "bridge", 12.5, 1.5, 1.9, 2000, "equal bits")
    monkeypatch.setattr(bridge_overhead, "measure", lambda dtypes: [row])
    assert command.run(parse("bridge")) == 0
    out = capsys.readouterr().out
    assert "12.5 us" in out
    assert "equal bits" in out
    assert "1.9" in out
    assert "measured on CPU" in out
    assert command.run(parse("bridge", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["times_direct"] == 1.9


def test_a_bridge_that_is_wrong_is_not_timed(monkeypatch, capsys):
    def measure(dtypes):
        raise AssertionError("bridge overhead: dlpack differs from direct; nothing was timed.")

    monkeypatch.setattr(bridge_overhead, "measure", measure)
    assert command.run(parse("bridge")) == 1
    assert "nothing was timed" in capsys.readouterr().err


def test_the_command_line_starts_no_other_device_than_the_cpu(monkeypatch):
    seen = {}
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")  # so that what main sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(command, "run", lambda args: seen.update(os.environ) or 0)
    assert main(["bench", "bridge"]) == 0
    assert (seen["TORCH_DEVICE_BACKEND_AUTOLOAD"], seen["JAX_PLATFORMS"]) == ("0", "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert main(["bench", "bridge"]) == 0
    assert seen["JAX_PLATFORMS"] == "tpu"
