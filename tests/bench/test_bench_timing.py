"""The clock must measure the job: compilation apart, waiting included, order fair, caches as stated."""

import statistics
import threading
import time

import numpy as np
import pytest

from pallas_hub.bench import timing as timing_module
from pallas_hub.bench.timing import CacheFlush, Timing, _rounds, measure, wait_for


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when a test says so: exact times on a busy machine too."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

        def work(self, seconds):
            self.now += seconds

    fake = Clock()
    monkeypatch.setattr(timing_module, "time", fake)
    return fake


def test_compilation_is_reported_apart():
    own = []

    def slow_once():
        start = time.perf_counter()
        time.sleep(0.010 if own else 2.0)
        own.append(time.perf_counter() - start)

    timing = measure({"fake": slow_once}, seconds=0.3)["fake"]
    assert timing.first_s >= 2.0
    assert timing.repeats >= 5
    # Within 1 ms of 10 ms, counted from when the busy system really woke us.
    assert timing.median_s == pytest.approx(statistics.median(own[-timing.repeats :]), abs=0.001)
    assert timing.min_s >= 0.010


def test_compilation_is_reported_apart_on_an_exact_clock(clock):
    calls = []

    def slow_once():
        calls.append(1)
        clock.work(2.0 if len(calls) == 1 else 0.010)

    timing = measure({"fake": slow_once}, seconds=0.3)["fake"]
    assert timing.first_s == pytest.approx(2.0)
    assert timing.median_s == pytest.approx(0.010)
    assert timing.spread_s == pytest.approx(0.0, abs=1e-9)


class Handle:
    """Stands for an array whose work goes on after the call returned."""

    def __init__(self, seconds):
        self._thread = threading.Thread(target=time.sleep, args=(seconds,))
        self._thread.start()

    def block_until_ready(self):
        self._thread.join()


def test_the_wait_for_unfinished_work_is_included():
    timing = measure({"fake": lambda: Handle(0.010)}, seconds=0.3)["fake"]
    assert timing.min_s >= 0.010


def test_unfinished_work_inside_tuples_and_dicts_is_waited_for():
    start = time.perf_counter()
    wait_for((1, [Handle(0.03)], {"y": Handle(0.05)}))
    assert time.perf_counter() - start >= 0.05


def test_a_device_without_synchronize_is_refused():
    class FakeDevice:
        type = "abacus"

        def __str__(self):
            return "abacus:0"

    class FakeTensor:
        device = FakeDevice()

    with pytest.raises(RuntimeError, match=r"no way to wait for device abacus:0.*pass wait="):
        wait_for(FakeTensor())


def test_a_device_with_synchronize_is_synchronised(monkeypatch):
    import torch

    seen = []

    class FakeModule:
        synchronize = staticmethod(seen.append)

    class FakeDevice:
        type = "abacus"

    class FakeTensor:
        device = FakeDevice()

    monkeypatch.setattr(torch, "abacus", FakeModule, raising=False)
    wait_for(FakeTensor())
    assert seen == [FakeTensor.device]


def test_rounds_are_interleaved_and_rotated():
    order = []
    measure({name: lambda name=name: order.append(name) or time.sleep(0.001) for name in "abc"}, seconds=0, warmups=1)
    rounds = order[6:]  # after one first call and one warm-up each
    assert len(rounds) == 15  # MIN_ROUNDS rounds of three
    for index in range(0, len(rounds), 3):
        assert sorted(rounds[index : index + 3]) == ["a", "b", "c"]
    firsts = {rounds[index] for index in range(0, len(rounds), 3)}
    assert firsts == {"a", "b", "c"}


def test_neighbours_change_between_rounds():
    followers = {(order[i], order[i + 1]) for order in _rounds(["a", "b", "c"], 6) for i in range(2)}
    assert len(followers) == 6  # every ordered pair occurs


def test_short_jobs_are_called_many_times_per_sample():
    timing = measure({"noop": lambda: None}, seconds=0.05)["noop"]
    assert timing.calls_per_sample > 10
    assert timing.median_s < 20e-6


def test_time_budget_sets_the_number_of_repeats(clock):
    timing = measure({"nap": lambda: clock.work(0.005)}, seconds=0.2525)["nap"]
    assert timing.repeats == 51  # the round that crosses the line is finished


def test_all_implementations_share_the_budget(clock):
    calls = {"fast": lambda: clock.work(0.001), "slow": lambda: clock.work(0.009)}
    timings = measure(calls, seconds=0.0999)
    assert [timings[name].repeats for name in calls] == [10, 10]


def test_slow_jobs_get_their_least_number_of_repeats(clock):
    assert measure({"slow": lambda: clock.work(3.0)}, seconds=1.0)["slow"].repeats == 5


def test_flush_runs_before_every_sample_and_is_not_timed(clock):
    flushes = []

    def flush():
        flushes.append(1)
        clock.work(0.02)

    timing = measure({"fast": lambda: clock.work(1e-6)}, seconds=0.2, flush=flush)["fast"]
    assert timing.cold
    assert timing.calls_per_sample == 1
    assert len(flushes) == timing.repeats
    assert timing.median_s == pytest.approx(1e-6, rel=1e-3)


def test_cache_flush_evicts_a_warm_buffer():
    """Reading 1 MiB is slower right after the flush than when it lies in the cache. numpy: one thread, no barrier."""
    buffer = np.ones(2**17, dtype=np.int64)
    flush = CacheFlush()
    warm = measure({"read": buffer.sum}, seconds=0.3)["read"]
    cold = measure({"read": buffer.sum}, seconds=0.5, flush=flush)["read"]
    assert flush.nbytes >= 2 * buffer.nbytes
    assert cold.min_s > 1.1 * warm.min_s


def test_median_spread_and_minimum():
    timing = Timing("x", 9.0, (1.0, 2.0, 3.0, 4.0, 100.0), 1, cold=False)
    assert (timing.median_s, timing.min_s, timing.spread_s, timing.repeats) == (3.0, 1.0, 2.0, 5)
    assert timing.to_json()["median_s"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"implementations": {}}, "needs at least one implementation; got none"),
        ({"implementations": {"a": int}, "min_rounds": 1}, "2 <= min_rounds <= max_rounds; got min_rounds=1"),
        ({"implementations": {"a": int}, "min_rounds": 9, "max_rounds": 8}, "got min_rounds=9, max_rounds=8"),
    ],
    ids=["nothing", "one-round", "max-below-min"],
)
def test_measure_rejects(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(**arguments)
