"""Run a case: check every implementation, then time those that are right, in the same interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pallas_hub.bench.case import Case, CaseResult, Implementation, Row
from pallas_hub.bench.checks import compare, run_and_name_path
from pallas_hub.bench.machine import available_memory_bytes
from pallas_hub.bench.timing import CacheFlush, Timing, measure, wait_for

_STREAM = "\0stream"  # cannot be the name of an implementation


def run_case(
    case: Case, *, seconds: float = 5.0, cold: bool = False, record_paths: Callable[[], Any] | None = None
) -> CaseResult:
    """Check, then time. An implementation that fails its check is reported and never timed."""
    exact = case.exact()
    rows = [_check(implementation, case, exact, record_paths) for implementation in case.implementations]
    rows += [Row(name, skipped=why) for name, why in case.unavailable.items()]
    right = {row.name for row in rows if row.check is not None and not row.failed}
    calls = {item.name: item.call for item in case.implementations if item.name in right}
    if not calls:
        return CaseResult(case, rows, stream=None)
    timings = measure({_STREAM: case.stream, **calls}, seconds=seconds, flush=CacheFlush() if cold else None)
    return CaseResult(case, [_with_timing(row, timings) for row in rows], stream=timings[_STREAM])


def _with_timing(row: Row, timings: dict[str, Timing]) -> Row:
    if row.name not in timings:
        return row
    # The very first call was that of the check: it holds the compilation.
    return replace(row, timing=replace(timings[row.name], first_s=row.first_s))


def _check(item: Implementation, case: Case, exact: Any, record_paths: Callable[[], Any] | None) -> Row:
    available = available_memory_bytes()
    if available is not None and item.memory_bytes > 0.8 * available:
        need, free = item.memory_bytes / 2**30, available / 2**30
        return Row(item.name, item.ours, skipped=f"needs {need:.1f} GiB more memory; {free:.1f} GiB are free")
    start = time.perf_counter()
    try:
        result = item.call()
        wait_for(result)
        first_s = time.perf_counter() - start
        check, path = compare(result, exact, case.tolerance), item.path
        recorder = record_paths if item.ours else None
        if check.passed and (recorder or item.telling_ops):
            # A call of its own: being watched may change what runs, and what is timed has to be what was checked.
            watched, path = run_and_name_path(item.call, recorder, item.telling_ops)
            check = max(
                check, compare(watched, exact, case.tolerance), key=lambda check: (not check.passed, check.error)
            )
    except Exception as error:  # whatever a rival raises is its result, not the end of the benchmark
        first_line = (str(error).splitlines() or [""])[0]
        return Row(item.name, item.ours, error=f"{type(error).__name__}: {first_line}")
    return Row(item.name, item.ours, check=check, first_s=first_s, path=path)
