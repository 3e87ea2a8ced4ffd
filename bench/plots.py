"""Bar charts of benchmark results. matplotlib is an optional dependency."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from pallas_hub.bench.case import CaseResult


class PlotError(RuntimeError):
    """The chart cannot be drawn or saved."""


def require_matplotlib() -> None:
    """Raise PlotError at once, before minutes of measuring, when charts cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotError(
            "bench: --plot needs matplotlib, which is not installed. Try `pip install matplotlib`, or leave --plot out."
        ) from error


def save_plot(machine: dict[str, Any], results: list[CaseResult], path: Path) -> None:
    """One panel per case: median milliseconds per implementation, quartile spread, and the streaming floor."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawable = [result for result in results if result.stream]
    if not drawable:
        raise PlotError("bench: nothing to plot: no implementation passed its check.")
    figure = Figure(figsize=(9, 1.2 + 2.6 * len(drawable)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, result in zip(figure.subplots(len(drawable), squeeze=False)[:, 0], drawable, strict=True):
        _draw(axes, result)
    figure.suptitle(f"measured on {machine['cpu']}, commit {machine['commit']}, {machine['date'][:10]}", fontsize=9)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlotError(f"bench: cannot write the chart to {path}: {error}") from error


def _draw(axes: Any, result: CaseResult) -> None:
    medians = [1e3 * timing.median_s for _, timing in result.timed]
    spreads = [1e3 * timing.spread_s / 2 for _, timing in result.timed]
    colors = ["tab:orange" if row.ours else "tab:blue" for row, _ in result.timed]
    bars = axes.barh([row.name for row, _ in result.timed], medians, xerr=spreads, color=colors)
    axes.bar_label(bars, fmt="%.3g", padding=4, fontsize=8)
    if result.stream:
        axes.axvline(1e3 * result.stream.median_s, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    title = f"{result.case.title}; dashed: {result.case.stream_name}"
    axes.set_title("\n".join(textwrap.wrap(title, 78)), fontsize=9)
    axes.set_xlabel("median, milliseconds", fontsize=8)
    axes.margins(x=0.12)
