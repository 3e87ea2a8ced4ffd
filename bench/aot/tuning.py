"""Choose block sizes with the real compiler: compile candidates, keep the one with the least modelled kernel time.

Compiled, not measured: the numbers are the report's, with its limits, so a candidate replaces the default only when the
model says it gains at least MIN_GAIN. Among candidates that close together, the one with the fewest spills wins, then
the one with the least VMEM. A candidate that the compiler refuses is recorded with the reason.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.kernels import Wish, compile_wishes
from pallas_hub.bench.aot.programs import Workload, kernel_programs
from pallas_hub.bench.aot.report import Report
from pallas_hub.bench.aot.runner import require_libtpu
from pallas_hub.bench.aot.table import versions

MIN_GAIN = 0.01  # modelled times closer than this say nothing
FAR = 4.0  # a tuned shape stands for others up to this factor away in every size


@dataclass(frozen=True)
class Tuned:
    """The best blocks for one workload."""

    workload: Workload
    use: dict[str, int]
    modelled_us: float | None
    default_us: float | None
    tried: int
    failed: tuple[str, ...]  # "blocks: reason"

    @property
    def gain(self) -> float:
        if not self.modelled_us or not self.default_us:
            return 0.0
        return self.default_us / self.modelled_us - 1


def tune(
    kernel: str,
    workloads: Sequence[Workload],
    target: str,
    *,
    limit: int | None = None,
    on_workload: Callable[[Tuned], None] | None = None,
    **options: Any,
) -> list[Tuned]:
    """Search `limit` candidates (all when None) per workload. Stopped and started again, it goes on from its cache.

    Raises   ValueError: unknown kernel or target.  LibtpuMissing
    """
    require_libtpu()
    if target not in HARDWARE:
        raise ValueError(f"tune: target must be one of {', '.join(HARDWARE)}; got {target!r}.")
    module = kernel_programs(kernel)
    found = []
    for workload in workloads:
        default = module.own_blocks(workload.op, workload.case, target)
        others = [blocks for blocks in module.tune_blocks(workload.op, workload.case, target) if blocks != default]
        candidates = [default, *others[:limit]]
        wishes = [Wish(kernel, workload, target, "ours", blocks, blocks is default) for blocks in candidates]
        tuned = choose(workload, candidates, compile_wishes(wishes, around=False, **options))
        found.append(tuned)
        if on_workload is not None:
            on_workload(tuned)
    return found


def choose(workload: Workload, candidates: Sequence[dict[str, int]], reports: Sequence[Report]) -> Tuned:
    """The best of the candidates; the first is the default, and stays when nothing gains MIN_GAIN on it."""
    timed = [(report.kernel_us, i) for i, report in enumerate(reports) if report.kernel_us]
    failed = tuple(f"{candidates[i]}: {r.reason}" for i, r in enumerate(reports) if r.status != "compiled")
    best, default_us = 0, reports[0].kernel_us
    if timed:
        least = min(timed)[0]
        if default_us is None or default_us > least * (1 + MIN_GAIN):
            close = [i for us, i in timed if us <= least * (1 + MIN_GAIN)]
            best = min(close, key=lambda i: (reports[i].spills, max(k.vmem_bytes for k in reports[i].kernels)))
    return Tuned(workload, candidates[best], reports[best].kernel_us, default_us, len(candidates), failed)


def write(kernel: str, target: str, found: Sequence[Tuned], path: Path) -> None:
    """Merge into the file of this device: entries of other workloads stay."""
    module = kernel_programs(kernel)
    old = json.loads(path.read_text())["entries"] if path.is_file() else []
    new = [
        {
            "when": module.sizes(tuned.workload.op, tuned.workload.case),
            "use": tuned.use,
            "modelled_us": _rounded(tuned.modelled_us),
            "default_us": _rounded(tuned.default_us),
            "gain": round(tuned.gain, 4),
            "tried": tuned.tried,
        }
        for tuned in found
    ]
    kept = [entry for entry in old if entry["when"] not in [made["when"] for made in new]]
    body = {
        "kernel": kernel,
        "device": HARDWARE[target].device_kind,
        **versions(),
        "modelled": datetime.date.today().isoformat(),
        "entries": sorted(kept + new, key=lambda entry: json.dumps(entry["when"], sort_keys=True)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=2) + "\n")


def look_up(
    entries: Sequence[Mapping[str, Any]],
    when: Mapping[str, Any],
    default: dict[str, int],
    fits: Callable[[dict[str, int]], bool],
) -> dict[str, int]:
    """Blocks of the nearest tuned shape, or `default`: never a failure, and never blocks that `fits` rejects.

    Names (op, dtype) have to be equal; sizes may differ by up to FAR, and the nearest is the one with the least
    product of size ratios.
    """
    best, distance = default, None
    for entry in entries:
        far = _distance(entry.get("when", {}), when)
        use = entry.get("use")
        if far is None or not isinstance(use, dict) or (distance is not None and far >= distance):
            continue
        if use.keys() == default.keys() and fits(dict(use)):
            best, distance = dict(use), far
    return best


def _distance(tuned: Mapping[str, Any], when: Mapping[str, Any]) -> float | None:
    if tuned.keys() != when.keys():
        return None
    product = 1.0
    for name, value in when.items():
        other = tuned[name]
        if isinstance(value, str) or isinstance(other, str) or isinstance(value, bool):
            if value != other:
                return None
            continue
        if value <= 0 or other <= 0:
            return None
        ratio = max(value / other, other / value)
        if ratio > FAR:
            return None
        product *= ratio
    return product


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
