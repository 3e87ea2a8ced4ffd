"""No timing without a passed check, and a table that says what really ran."""

import json
import math
import time
from contextlib import contextmanager

import pytest
import torch

from pallas_hub.bench import report, runner
from pallas_hub.bench.case import Case, Implementation
from pallas_hub.bench.checks import compare, run_and_name_path, tolerance_for
from pallas_hub.bench.machine import describe_machine, header_lines, last_level_cache_bytes
from pallas_hub.bench.runner import run_case

X = torch.arange(1.0, 65.0)


def a_case(*implementations, **changes):
    values = {
        "workload": "doubling",
        "sizes": {"n": 64},
        "dtype": "float32",
        "exact": lambda: X.double() * 2,
        "tolerance": 1e-6,
        "least_bytes": 512,
        "stream": X.clone,
        "stream_name": "streaming copy",
        "implementations": list(implementations),
    }
    return Case(**(values | changes))


def right(name="right", **more):
    return Implementation(name, lambda: X * 2, **more)


def test_a_wrong_result_is_reported_and_never_timed():
    calls = []

    def wrong():
        calls.append(1)
        return X * 2.001

    result = run_case(a_case(right(), Implementation("wrong", wrong)), seconds=0.01)
    row = next(row for row in result.rows if row.name == "wrong")
    assert result.failed
    assert row.failed
    assert row.timing is None
    assert len(calls) == 1  # the check, and nothing after it
    text = report.text(describe_machine(), [result])
    assert "NOT TIMED wrong: check failed: error 5.00e-04 is above 1.00e-06" in text
    assert not report.to_json(describe_machine(), [result])["passed"]


def test_an_implementation_that_raises_does_not_end_the_run():
    def broken():
        raise RuntimeError("out of beans")

    result = run_case(a_case(right(), Implementation("broken", broken)), seconds=0.01)
    assert result.rows[0].timing
    assert result.failed
    assert "NOT TIMED broken: RuntimeError: out of beans" in report.text(describe_machine(), [result])


def test_nothing_is_timed_when_every_check_fails():
    result = run_case(a_case(Implementation("wrong", lambda: X)), seconds=0.01)
    assert result.stream is None
    assert result.failed
    assert "median" not in report.text(describe_machine(), [result])


def test_a_rival_that_needs_too_much_memory_is_skipped_in_words(monkeypatch):
    monkeypatch.setattr(runner, "available_memory_bytes", lambda: 2 * 2**30)
    result = run_case(a_case(right(), right("hungry", memory_bytes=4 * 2**30)), seconds=0.01)
    assert not result.failed
    assert "skipped hungry: needs 4.0 GiB more memory; 2.0 GiB are free" in report.text(describe_machine(), [result])


def test_unavailable_rivals_are_named():
    result = run_case(a_case(right(), unavailable={"torch.compile": "no C++ compiler"}), seconds=0.01)
    assert "skipped torch.compile: no C++ compiler" in report.text(describe_machine(), [result])


def test_the_first_call_of_all_is_the_one_reported_as_first():
    calls = []

    def slow_once():
        calls.append(1)
        time.sleep(0.2 if len(calls) == 1 else 0.0)
        return X * 2

    row = run_case(a_case(Implementation("slow once", slow_once)), seconds=0.01).rows[0]
    assert row.timing.first_s >= 0.2 > row.timing.median_s


def test_speed_compares_with_the_fastest_other_row():
    def slow():
        time.sleep(0.004)
        return X * 2

    def slower():
        time.sleep(0.016)
        return X * 2

    rows = [right("fast"), Implementation("slow", slow), Implementation("slower", slower)]
    result = run_case(a_case(*rows), seconds=0.2)
    fast, slow, slower = result.rows
    assert result.best_other(fast)[0].name == "slow"
    assert result.speed(fast) > 1
    assert result.best_other(slower)[0].name == "fast"
    assert result.speed(slower) < 1
    assert result.speed(slow) == pytest.approx(fast.timing.median_s / slow.timing.median_s)
    assert result.share(slow) == pytest.approx(result.stream.median_s / slow.timing.median_s)


def test_json_holds_every_row_and_the_machine():
    result = run_case(a_case(right(ours=True), Implementation("wrong", lambda: X)), seconds=0.01)
    data = json.loads(json.dumps(report.to_json(describe_machine(), [result])))
    assert {"cpu", "versions", "commit", "date", "torch_threads", "measured_on"} <= data["machine"].keys()
    ours, wrong = data["cases"][0]["rows"]
    assert ours["status"] == "timed"
    assert ours["timing"]["repeats"] >= 5
    assert ours["bytes_per_s"] > 0
    assert wrong["status"] == "failed"
    assert wrong["timing"] is None
    assert "is above" in wrong["reason"]


def test_json_stays_valid_when_a_result_is_nan():
    result = run_case(a_case(Implementation("nan", lambda: X * math.nan)), seconds=0.01)
    text = json.dumps(report.to_json(describe_machine(), [result]), allow_nan=False)
    (row,) = json.loads(text)["cases"][0]["rows"]
    assert row["check_error"] is None
    assert row["reason"] == "check failed: result holds NaN"


def test_the_path_comes_from_the_bridge():
    @contextmanager
    def record_paths():
        yield [("rms_norm_v1::rms_norm", "torch"), ("rms_norm_v1::rms_norm", "torch")]

    assert run_and_name_path(lambda: 1, record_paths) == (1, "rms_norm: torch")


def test_a_result_that_is_right_only_while_watched_fails():
    """A kernel may take another way when its paths are recorded; the way that is timed has to be the checked one."""
    watched = []

    @contextmanager
    def record_paths():
        watched.append(1)
        yield [("op", "torch")]
        watched.clear()

    def right_while_watched():
        return X * (2 if watched else 3)

    def wrong_while_watched():
        return X * (3 if watched else 2)

    for call in (right_while_watched, wrong_while_watched):
        (row,) = run_case(a_case(Implementation("it", call, ours=True)), seconds=0.01, record_paths=record_paths).rows
        assert row.failed
        assert row.timing is None


def test_a_rival_that_fell_back_is_named_by_the_operator_that_ran():
    telling = ("aten::mm", "aten::mul.Tensor")
    assert run_and_name_path(lambda: torch.ones(2, 2) @ torch.ones(2, 2), None, telling)[1] == "aten::mm"
    assert run_and_name_path(lambda: torch.ones(2) * torch.ones(2), None, telling)[1] == "aten::mul.Tensor"
    assert run_and_name_path(lambda: torch.ones(2), None, telling)[1] == "none of aten::mm, aten::mul.Tensor"


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        (torch.zeros(3), r"shape is \(3,\), must be \(2,\)"),
        (torch.tensor([1.0, math.nan]), "result holds NaN"),
        (torch.tensor([1.0, 2.5]), "error 2.50e-01 is above 1.00e-02"),
        (torch.tensor([1.0, math.inf]), "error inf is above"),
    ],
    ids=["shape", "nan", "far", "inf"],
)
def test_compare_finds(got, problem):
    import re

    check = compare(got, torch.tensor([1.0, 2.0], dtype=torch.float64), 0.01)
    assert not check.passed
    assert re.search(problem, check.problem)


def test_compare_accepts_empty_results_and_arrays_of_other_libraries():
    import numpy as np

    assert compare(torch.zeros(0), torch.zeros(0, dtype=torch.float64), 0.0).passed
    assert compare(np.array([1.0, 2.0], dtype=np.float32), torch.tensor([1.0, 2.0], dtype=torch.float64), 0.0).passed


def test_compare_is_relative_to_the_largest_entry():
    exact = torch.tensor([1000.0, 0.0], dtype=torch.float64)
    assert compare(torch.tensor([1000.0, 0.5]), exact, 1e-3).passed
    assert not compare(torch.tensor([1000.0, 1.5]), exact, 1e-3).passed


def test_tolerance_grows_with_the_sum_and_the_rounding():
    assert tolerance_for(torch.float32, 4096) == pytest.approx(4 * 2**-23 * (1 + 64))
    assert tolerance_for(torch.bfloat16, 1) == pytest.approx(4 * 2**-7, rel=1e-3)


def test_header_names_device_threads_versions_commit_and_date():
    machine = describe_machine()
    text = "\n".join(header_lines(machine))
    for part in (machine["cpu"], "measured on CPU", f"torch {torch.__version__}", "commit", machine["date"]):
        assert part in text


def test_a_busy_machine_is_admitted():
    machine = describe_machine() | {"load_average_1min": 7.5, "cpus": 2}
    assert "busy before the run (load average 7.5)" in "\n".join(header_lines(machine))
    machine["load_average_1min"] = 0.1
    assert "busy" not in "\n".join(header_lines(machine))


def test_cache_size_is_plausible():
    assert 2**18 <= last_level_cache_bytes() <= 2**33


def test_durations_and_sizes_are_readable():
    assert [report.duration(s) for s in (2.5, 0.01234, 5.678e-6)] == ["2.5 s", "12.3 ms", "5.68 us"]
    assert [report.size(b) for b in (75_497_472, 2.4e9, 999)] == ["75.5 MB", "2.4 GB", "999 B"]
