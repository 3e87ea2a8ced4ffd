"""The tables of `pallas-hub bench decode`, and the same as JSON."""

from __future__ import annotations

import math
import statistics
from typing import Any

from pallas_hub.bench.decode import OURS, DecodeResult, Way
from pallas_hub.bench.decode_models import DecodeModel
from pallas_hub.bench.report import duration, table

_COLUMNS = (
    "experts", "first step", "median step", "spread", "min", "of it head", "tokens/s", "x kernelize",
    "logits differ", "same tokens",
)  # fmt: skip


def title_line(chosen: DecodeModel, layers: int, dtype: str, nbytes: int) -> str:
    return f"{chosen.describe(layers)}, random weights, {dtype}, {nbytes / 1e9:.3g} GB"


def result_lines(result: DecodeResult, chosen: DecodeModel, layers: int) -> list[str]:
    lines = [
        f"batch {result.batch}: {result.steps} tokens after a prompt of {result.prompt}; {result.hit:.0f} experts of a "
        f"layer have a token; tolerance {result.tolerance:.1e}"
    ]
    lines += table(_COLUMNS, [_cells(result, way) for way in result.ways if way.timing])
    for way in result.ways:
        if way.failed:
            lines.append(f"NOT TIMED {way.name}: {way.error}")
        elif way.skipped:
            lines.append(f"skipped {way.name}: {way.skipped}")
    return lines + _ratio_lines(result, chosen, layers)


def _cells(result: DecodeResult, way: Way) -> list[str]:
    timing, agreement = way.timing, way.agreement
    assert timing is not None
    assert agreement is not None
    ratio = result.ratio(way)
    return [
        way.name + (" (ours)" if way.ours else " (default)" if way.default else ""),
        *(duration(seconds) for seconds in (timing.first_s, timing.median_s, timing.spread_s, timing.min_s)),
        duration(statistics.median(way.heads_s)),
        f"{result.batch / timing.median_s:.3g}",
        f"{ratio:.2f}" if ratio else "-",
        f"{statistics.median(agreement.errors):.1e}, {max(agreement.errors):.1e}",
        f"{agreement.same_tokens} of {len(agreement.errors)}"
        + (f", others within {max(agreement.ties):.1e}" if agreement.ties else ""),
    ]


def _ratio_lines(result: DecodeResult, chosen: DecodeModel, layers: int) -> list[str]:
    lines = []
    for what, other in (("the default", result.default), ("the fastest", result.fastest_other)):
        ratio = result.ratio(other)
        if other is None or ratio is None or (what == "the fastest" and other is result.default):
            continue
        stretched = result.ratio(other, chosen.depth / layers)
        line = f"whole-model decode ratio to {what}, {other.name}: {ratio:.2f} measured with {layers} layers"
        if layers < chosen.depth and stretched:
            line += (
                f", {stretched:.2f} extrapolated to {chosen.depth} (the head once, the rest {chosen.depth}/{layers}x)"
            )
        lines.append(line)
    return lines


def explanation_lines() -> list[str]:
    return [
        "a step makes one token per sequence; first step: with what is made at the first call, not in the median;",
        f"x {OURS}: how many times as long as that takes; logits differ: median and worst of all choices, relative to",
        "the largest logit of Transformers' own loop; others: tokens that are all but as good there",
    ]


def to_json(about: dict[str, Any], chosen: DecodeModel, layers: int, dtype: str, results: list[DecodeResult]) -> dict:
    return {
        "machine": about,
        "model": chosen.title,
        "layers": layers,
        "depth": chosen.depth,
        "dtype": dtype,
        "passed": not any(result.failed for result in results),
        "batches": [_result_json(result, chosen.depth / layers) for result in results],
    }


def _result_json(result: DecodeResult, stretch: float) -> dict[str, Any]:
    default, fastest = result.default, result.fastest_other
    return {
        "batch": result.batch,
        "prompt": result.prompt,
        "steps": result.steps,
        "experts_hit": result.hit,
        "tolerance": result.tolerance,
        "default": default and default.name,
        "fastest_other": fastest and fastest.name,
        "ratio_to_default": result.ratio(default),
        "ratio_to_fastest_other": result.ratio(fastest),
        "extrapolated_ratio_to_default": result.ratio(default, stretch),
        "extrapolated_ratio_to_fastest_other": result.ratio(fastest, stretch),
        "ways": [_way_json(result, way) for way in result.ways],
    }


def _way_json(result: DecodeResult, way: Way) -> dict[str, Any]:
    errors = way.agreement.errors if way.agreement else []
    finite = [error for error in errors if math.isfinite(error)]
    return {
        "name": way.name,
        "ours": way.ours,
        "default": way.default,
        "status": "failed" if way.failed else "skipped" if way.skipped else "timed",
        "reason": way.error or way.skipped,
        "timing": way.timing.to_json() if way.timing else None,
        "head_s": statistics.median(way.heads_s) if way.timing else None,
        "ratio": result.ratio(way),
        "median_error": statistics.median(finite) if finite else None,
        "worst_error": max(finite, default=None),
        "choices": len(errors),
        "same_tokens": way.agreement.same_tokens if way.agreement else None,
        "largest_tie": max(way.agreement.ties, default=None) if way.agreement else None,
    }
