"""Reports as text, HTML and JSON. Every column says whether it was compiled, counted or modelled."""

from __future__ import annotations

import html
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from pallas_hub.bench.aot.kernels import IMPLS, Row
from pallas_hub.bench.aot.report import MIB, Report

# Title, heading, how to get it from a row.
_GROUPS: dict[str, tuple[tuple[str, Any], ...]] = {
    "": (
        ("target", lambda r: r.target),
        ("who", None),
        ("blocks", None),
    ),
    "compiled": (
        ("VMEM MiB", lambda r: _each(r, lambda k: f"{k.vmem_bytes / MIB:.1f}/{k.vmem_limit_bytes / MIB:.0f}")),
        ("bundles/step", lambda r: _each(r, _bundles)),
        ("matrix units", lambda r: _each(r, lambda k: f"{k.matmul_share:.0%}" if k.matmul_share else "-")),
        ("spill/fill", lambda r: _each(r, lambda k: f"{k.spills}/{k.fills}")),
    ),
    "counted": (
        ("steps", lambda r: _each(r, _steps)),
        ("MB", lambda r: _amount(r.bytes, 1e6)),
        ("x least", lambda r: f"{r.bytes / r.least_bytes:.3f}" if r.bytes and r.least_bytes else "-"),
    ),
    "modelled": (
        ("kernel us", lambda r: _amount(r.kernel_us)),
        ("XLA around us", lambda r: _amount(r.xla_us) if r.kernels else "-"),
        ("total us", lambda r: _amount(r.time_us)),
        ("bound by", lambda r: _bound(r)),
        ("of roofline", lambda r: f"{r.roofline_share:.0%}" if r.roofline_share else "-"),
    ),
}


def text(rows: Sequence[Row], *, title: bool = True) -> str:
    """One table per workload, with the reasons and notes below it."""
    parts = [about()] if title else []
    for (case, op), own in _by_workload(rows).items():
        head, lines = _cells(own)
        parts += ["", f"{case}  {op}", *_align(head, lines), *_notes(own)]
    return "\n".join(parts)


def as_html(rows: Sequence[Row]) -> str:
    """A page of its own, without scripts and without anything fetched."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>pallas-hub aot</title>",
        "<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin:.5em 0 1.5em}"
        "td,th{padding:.2em .7em;border-bottom:1px solid #ccc;text-align:right}td:nth-child(-n+3){text-align:left}"
        "tr.ours{font-weight:bold}</style>",
        f"<p>{html.escape(about())}</p>",
    ]
    for (case, op), own in _by_workload(rows).items():
        groups = "".join(f"<th colspan={len(columns)}>{group}</th>" for group, columns in _GROUPS.items())
        names = "".join(f"<th>{name}</th>" for columns in _GROUPS.values() for name, _ in columns)
        parts.append(f"<h3>{html.escape(case)} {html.escape(op)}</h3><table><tr>{groups}</tr><tr>{names}</tr>")
        for row, cells in zip(own, _cells(own)[1], strict=True):
            mark = " class=ours" if row.impl == "ours" else ""
            parts.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
        parts.append("</table>" + "".join(f"<p>{html.escape(note.strip())}</p>" for note in _notes(own)))
    return "\n".join(parts)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "versions": versions(),
        "rows": [
            {
                "kernel": row.kernel,
                "case": row.workload.case,
                "op": row.workload.op,
                "impl": row.impl,
                "blocks": row.blocks,
                "same_tile": row.same_tile,
                "tilings_tried": row.tried,
                **row.report.as_numbers(),
            }
            for row in rows
        ],
    }


def about() -> str:
    names = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"Compiled for TPUs by {names}; nothing was run. Modelled times are best cases: see docs/aot.md."


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "libtpu", "tokamax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def report_text(reports: Sequence[Report]) -> str:
    """Reports of one program, without workloads or peers."""
    head = [name for columns in _GROUPS.values() for name, get in columns if get is not None]
    groups = [group for group, columns in _GROUPS.items() for _, get in columns if get is not None]
    lines = [[get(r) for columns in _GROUPS.values() for _, get in columns if get is not None] for r in reports]
    notes = [note for report in reports for note in _report_notes(report, report.target)]
    return "\n".join([about(), "", *_align([groups, head], lines), *dict.fromkeys(notes)])


def _by_workload(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.workload.case, row.workload.op), []).append(row)
    return found


def _cells(rows: Sequence[Row]) -> tuple[list[list[str]], list[list[str]]]:
    head = [
        [group for group, columns in _GROUPS.items() for _ in columns],
        [name for columns in _GROUPS.values() for name, _ in columns],
    ]
    return head, [
        [
            get(row.report) if get else {"who": _who(row), "blocks": _blocks(row)}[name]
            for columns in _GROUPS.values()
            for name, get in columns
        ]
        for row in rows
    ]


def _who(row: Row) -> str:
    if row.tried > 1:
        return f"{IMPLS[row.impl]}, best of {row.tried}"
    return IMPLS[row.impl] + (", our blocks" if row.same_tile else "")


def _blocks(row: Row) -> str:
    return "x".join(str(v) for k, v in (row.blocks or {}).items() if k.startswith("block_")) or "-"


def _align(head: list[list[str]], lines: list[list[str]]) -> list[str]:
    """A group's name stands over its first column only."""
    groups, names = head
    first = [name if i == 0 or groups[i - 1] != name else "" for i, name in enumerate(groups)]
    table = [first, names, *lines]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    left = sum(1 for group in groups if not group)
    return [
        "  ".join(
            cell.ljust(width) if i < left or line is first else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    notes: dict[str, list[str]] = {}
    for row in rows:
        for note in _report_notes(row.report, ""):
            notes.setdefault(note, []).append(f"{row.report.target} {_who(row)}")
    return [f"  {', '.join(whose)}:{note}" for note, whose in notes.items()]


def _report_notes(report: Report, where: str) -> list[str]:
    notes = [] if report.status == "compiled" else [f"{where} {report.status}: {report.reason}"]
    return notes + [f"{where} {note}" for note in report.notes]


def _each(report: Report, show: Any) -> str:
    if not report.kernels:
        return "-" if report.status in ("compiled", "no estimate") else report.status
    return "+".join(show(kernel) for kernel in report.kernels)


def _bundles(kernel: Any) -> str:
    return f"{kernel.step_bundles}" + (f" ({kernel.conditional_bundles}?)" if kernel.conditional_bundles else "")


def _steps(kernel: Any) -> str:
    """All of them, and how many cores share them where that is more than one."""
    return _number(kernel.steps) + (f"/{kernel.cores} cores" if kernel.cores > 1 else "")


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _amount(value: float | None, unit: float = 1.0) -> str:
    if value is None:
        return "-"
    return f"{value / unit:.1f}" if value / unit >= 10 else f"{value / unit:.2f}"


def _bound(report: Report) -> str:
    """What the kernel with the longest time waits for."""
    timed = [kernel for kernel in report.kernels if kernel.time_us is not None and kernel.bytes is not None]
    if not timed:
        return "-"
    slowest = max(timed, key=lambda kernel: kernel.time_us or 0.0)
    return "HBM" if report.hardware.bandwidth_us(slowest.bytes or 0) >= (slowest.compute_us or 0.0) else "compute"
