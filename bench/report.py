"""Tables for people and JSON for machines, from the same results."""

from __future__ import annotations

import math
from typing import Any

from pallas_hub.bench.case import CaseResult, Row
from pallas_hub.bench.machine import header_lines
from pallas_hub.bench.timing import Timing

_COLUMNS = (
    "implementation", "check error", "first call", "median", "spread", "min", "repeats",
    "x best other", "GB/s", "of stream", "path that ran",
)  # fmt: skip


def duration(seconds: float) -> str:
    """Three significant digits in the unit that suits them."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


def size(nbytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def table(columns: tuple[str, ...], lines: list[list[str]]) -> list[str]:
    """Left-aligned first and last column, right-aligned numbers between them."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *lines, strict=True)]
    last = len(columns) - 1

    def join(cells: list[str] | tuple[str, ...]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return "  ".join(c.ljust(w) if i in (0, last) else c.rjust(w) for i, (c, w) in pairs).rstrip()

    return [join(columns), "  ".join("-" * width for width in widths), *(join(line) for line in lines)]


def text(machine: dict[str, Any], results: list[CaseResult]) -> str:
    return "\n".join([*header_lines(machine), *(line for result in results for line in ("", *case_lines(result)))])


def case_lines(result: CaseResult) -> list[str]:
    case = result.case
    cells = [_row_cells(result, row, timing) for row, timing in result.timed]
    lines = [case.title]
    if result.stream:
        state = "cold" if result.stream.cold else "warm"
        lines.append(f"least bytes to move {size(case.least_bytes)}; caches {state}; tolerance {case.tolerance:.1e}")
        lines += table(_COLUMNS, [*cells, _stream_cells(result, result.stream)])
        lines += _noise(result)
    for row in result.rows:
        if row.failed:
            lines.append(f"NOT TIMED {row.name}: {row.why_not}")
        elif row.skipped:
            lines.append(f"skipped {row.name}: {row.skipped}")
    return lines


def _noise(result: CaseResult) -> list[str]:
    """Name the rows whose quartiles lie far apart, so that nobody reads a difference into noise."""
    wide = [row.name for row, timing in result.timed if timing.spread_s > 0.25 * timing.median_s]
    return [f"noisy, spread above a quarter of the median: {', '.join(wide)}"] if wide else []


def _row_cells(result: CaseResult, row: Row, timing: Timing) -> list[str]:
    speed, share = result.speed(row), result.share(row)
    return [
        f"{row.name} (ours)" if row.ours else row.name,
        f"{row.check.error:.1e}" if row.check else "-",
        *_timing_cells(timing),
        f"{speed:.2f}" if speed else "-",
        f"{result.bandwidth(timing) / 1e9:.1f}",
        f"{share:.0%}" if share else "-",
        row.path,
    ]


def _stream_cells(result: CaseResult, timing: Timing) -> list[str]:
    bandwidth = f"{result.bandwidth(timing) / 1e9:.1f}"
    return [f"[{result.case.stream_name}]", "-", *_timing_cells(timing), "-", bandwidth, "100%", "the floor"]


def _timing_cells(timing: Timing) -> list[str]:
    times = (timing.first_s, timing.median_s, timing.spread_s, timing.min_s)
    return [*(duration(seconds) for seconds in times), str(timing.repeats)]


def bridge_text(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table of bench/bridge_overhead.py: host time per call of a trivial jitted JAX function."""
    columns = ("shape", "dtype", "way", "median", "spread", "times direct", "calls", "check")
    cells = [
        [
            str(row["shape"]),
            row["dtype"],
            row["way"],
            duration(row["median_us"] / 1e6),
            duration(row["iqr_us"] / 1e6),
            f"{row['times_direct']:.1f}",
            str(row["calls"]),
            row["checked"],
        ]
        for row in rows
    ]  # fmt: skip
    about = "host time per call: JAX arrays, waited for (direct); torch tensors, our op (bridge); by hand (dlpack)"
    return "\n".join([*header_lines(machine), "", about, *table(columns, cells)])


def to_json(machine: dict[str, Any], results: list[CaseResult]) -> dict[str, Any]:
    return {"machine": machine, "passed": not any(r.failed for r in results), "cases": [_case_json(r) for r in results]}


def _case_json(result: CaseResult) -> dict[str, Any]:
    case = result.case
    return {
        "workload": case.workload,
        "sizes": case.sizes,
        "dtype": case.dtype,
        "least_bytes": case.least_bytes,
        "tolerance": case.tolerance,
        "stream": result.stream
        and result.stream.to_json() | {"name": case.stream_name, "bytes_per_s": result.bandwidth(result.stream)},
        "rows": [_row_json(result, row) for row in result.rows],
    }


def _row_json(result: CaseResult, row: Row) -> dict[str, Any]:
    return {
        "implementation": row.name,
        "ours": row.ours,
        "status": "failed" if row.failed else "skipped" if row.skipped else "timed",
        "reason": row.why_not,
        "check_error": row.check.error if row.check and math.isfinite(row.check.error) else None,
        "path": row.path or None,
        "timing": row.timing.to_json() if row.timing else None,
        "speed_vs_best_other": result.speed(row),
        "best_other": best[0].name if row.timing and (best := result.best_other(row)) else None,
        "bytes_per_s": result.bandwidth(row.timing) if row.timing else None,
        "share_of_stream": result.share(row),
    }
