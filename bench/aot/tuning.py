"""Choose block sizes with the real compiler: compile candidates, keep the one with the least modelled kernel time.

Compiled, not measured: the numbers are the report's, with its limits, so a candidate replaces the default only when the
model says it gains at least MIN_GAIN, and two things do not count as a gain: one that spills more than the default, and
a shorter fill that is bought with more steps, since the model leaves out what each step waits for its copies to start.
Among candidates that close together, the one with the fewest spills wins, then the one with the least VMEM. A candidate
that the compiler refuses is recorded with the reason.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_hub.bench.aot.files import alone_in, replace_text
from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.kernels import Wish, compile_wishes
from pallas_hub.bench.aot.programs import Workload, kernel_programs
from pallas_hub.bench.aot.report import Report
from pallas_hub.bench.aot.runner import require_libtpu
from pallas_hub.bench.aot.table import versions

MIN_GAIN = 0.01  # modelled times closer than this say nothing


@dataclass(frozen=True)
class Tuned:
    """The best blocks for one workload."""

    workload: Workload
    use: dict[str, int]
    is_default: bool  # nothing gains MIN_GAIN on it
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
    if not hasattr(module, "tune_blocks"):
        raise ValueError(f"tune: {kernel} looks up no tuned blocks; its config.py computes them from the sizes.")
    found = []
    for workload in workloads:
        default = module.default_blocks(workload.op, workload.case, target)
        others = [blocks for blocks in module.tune_blocks(workload.op, workload.case, target) if blocks != default]
        candidates = [default, *others[:limit]]
        wishes = [Wish(kernel, workload, target, "ours", blocks, blocks is default) for blocks in candidates]
        tuned = choose(workload, candidates, compile_wishes(wishes, around=False, **options))
        found.append(tuned)
        if on_workload is not None:
            on_workload(tuned)
    return found


def choose(workload: Workload, candidates: Sequence[dict[str, int]], reports: Sequence[Report]) -> Tuned:
    """The best of the candidates. The first is the default: it stays when nothing gains MIN_GAIN on it.

    One without a time stays too, unless the compiler refuses it: that it ran out of time shows no gain.
    """
    failed = tuple(f"{candidates[i]}: {r.reason}" for i, r in enumerate(reports) if r.status != "compiled")
    times = [_time_us(report, reports[0]) for report in reports]
    best, default_us = 0, times[0]
    timed = [(us, i) for i, us in enumerate(times) if us]
    if timed and (default_us is not None or reports[0].status == "refused"):
        least = min(timed)[0]
        if default_us is None or default_us > least * (1 + MIN_GAIN):
            close = [i for us, i in timed if us <= least * (1 + MIN_GAIN)]
            best = min(close, key=lambda i: (reports[i].spills, max(k.vmem_bytes for k in reports[i].kernels)))
    return Tuned(workload, candidates[best], best == 0, times[best], default_us, len(candidates), failed)


def _time_us(report: Report, default: Report) -> float | None:
    """What a candidate is ranked by; None for one that can't replace the default."""
    if report.kernel_us is None or default.kernel_us is None:
        return report.kernel_us
    if report.spills > default.spills:
        return None
    more_steps = sum(k.steps or 0 for k in report.kernels) > sum(k.steps or 0 for k in default.kernels)
    return report.kernel_us + (max(0.0, _fill_us(default) - _fill_us(report)) if more_steps else 0.0)


def _fill_us(report: Report) -> float:
    return sum(report.hardware.bandwidth_us(kernel.cores * (kernel.fill_bytes or 0)) for kernel in report.kernels)


def write(kernel: str, target: str, found: Sequence[Tuned], path: Path) -> None:
    """Merge into the file of this device: entries of other workloads stay.

    Where the default is best there is no entry: another shape is better served by its own default than by this one's.
    Raises   ValueError: what lies there is no such file, or another kernel's or device's.
    """
    with alone_in(path.absolute().parent):
        _merge(kernel, target, found, path)


def read(kernel: str, target: str, path: Path) -> list[dict[str, Any]]:
    """The entries of the file that lies there; none when there is no file.

    Raises   ValueError: it is no file of tuned blocks, or another kernel's or device's.
    """
    if not path.is_file():
        return []
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        entries, whose = body["entries"], (body["kernel"], body["device"])
        if all(isinstance(entry["when"], dict) for entry in entries):
            if whose == (kernel, HARDWARE[target].device_kind):
                return entries
            raise ValueError(f"tune: {path} is for {whose[0]} on {whose[1]}; give another --out.")
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
        pass
    raise ValueError(f"tune: {path} is no file of tuned blocks; delete it, or give another --out.")


def _merge(kernel: str, target: str, found: Sequence[Tuned], path: Path) -> None:
    module = kernel_programs(kernel)
    old = read(kernel, target, path)
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
        if not tuned.is_default
    ]
    again = [module.sizes(tuned.workload.op, tuned.workload.case) for tuned in found]
    entries = [entry for entry in old if entry["when"] not in again] + new
    if not entries:
        path.unlink(missing_ok=True)
        return
    body = {
        "kernel": kernel,
        "device": HARDWARE[target].device_kind,
        **versions(),
        "modelled": datetime.date.today().isoformat(),
        "entries": sorted(entries, key=lambda entry: json.dumps(entry["when"], sort_keys=True)),
    }
    replace_text(path, json.dumps(body, indent=2) + "\n")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
