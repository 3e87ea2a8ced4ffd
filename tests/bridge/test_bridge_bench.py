"""The benchmark of the bridge: it checks before it times, and the bridge keeps its promise."""

import pytest
import torch

from pallas_hub.bench import bridge_overhead


def test_a_call_costs_at_most_five_times_a_direct_one_and_far_less_than_by_hand():
    for _ in range(3):  # the ratio is of medians; another try forgives a busy machine, not a slow bridge
        rows = {row.way: row for row in bridge_overhead.measure(((8, 8),), ("float32",), calls=1000)}
        assert rows["direct"].times_direct == 1
        if rows["bridge"].times_direct <= 5 and rows["dlpack"].times_direct >= 2 * rows["bridge"].times_direct:
            return
    pytest.fail(f"{rows}")


def test_rows_cover_what_was_asked_for():
    rows = bridge_overhead.measure(((8, 8), (64, 2)), ("float32", "bfloat16"), calls=50)
    assert [(r.shape, r.dtype, r.way) for r in rows] == [
        (shape, dtype, way)
        for dtype in ("float32", "bfloat16")
        for shape in ((8, 8), (64, 2))
        for way in ("direct", "bridge", "dlpack")
    ]
    assert all(r.median_us > 0 and r.iqr_us >= 0 and r.calls == 50 and r.checked == "equal bits" for r in rows)


def test_nothing_is_timed_if_a_result_is_wrong(monkeypatch):
    monkeypatch.setattr(bridge_overhead, "_add_one", lambda: lambda x: x + 2)
    monkeypatch.setattr(bridge_overhead, "_interleaved", lambda *a: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="bridge overhead: bridge differs from direct; nothing was timed"):
        bridge_overhead.measure(((8, 8),), ("float32",), calls=50)


def test_the_wait_for_the_result_is_part_of_the_time():
    import time

    calls = {"slow": lambda: time.sleep(0.002), "fast": lambda: torch.ones(1)}
    times = bridge_overhead._interleaved(calls, 10)
    assert min(times["slow"]) >= 2_000_000
    assert (len(times["slow"]), len(times["fast"])) == (10, 10)
