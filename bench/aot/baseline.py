"""Committed numbers of every kernel, workload and target; a change for the worse by more than 5 % is found.

The numbers are those that don't depend on the machine: bundles of a step, spills, VMEM and bytes. A file per kernel,
bench/baselines/<kernel>.json, is written by `pallas-hub aot KERNEL --update` and reviewed like code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_hub.bench.aot.files import alone_in, replace_text
from pallas_hub.bench.aot.hardware import HARDWARE
from pallas_hub.bench.aot.kernels import choose_workloads, compile_wishes, own_wish
from pallas_hub.bench.aot.programs import Workload
from pallas_hub.bench.aot.report import Report
from pallas_hub.bench.aot.table import versions

FOLDER = Path(__file__).resolve().parent.parent / "baselines"
TOLERANCE = 0.05
# A count this small may grow by a few without meaning anything; a spill where there was none does mean something.
_SLACK = {"bundles": 4, "spills": 8, "vmem_bytes": 4096, "bytes": 0, "steps": 0}
# Of the statuses; all others, which say that it does not compile, are 0.
_RANK = {"compiled": 2, "no estimate": 1}


@dataclass(frozen=True)
class Checked:
    """What the comparison found, as lines."""

    worse: tuple[str, ...]
    better: tuple[str, ...]
    compared: int
    versions_differ: str = ""
    unrecorded: int = 0  # workloads, ops and targets that were asked for and are not in the file

    def text(self) -> str:
        lines = [*self.worse, *self.better]
        if self.versions_differ:
            lines.append(self.versions_differ)
        if self.unrecorded:
            lines.append(f"{self.unrecorded} workloads (by op and target) are not recorded and were not compiled.")
        verdict = f"{len(self.worse)} worse" if self.worse else "none worse"
        lines.append(f"{self.compared} numbers compared with the baseline, {verdict} by more than {TOLERANCE:.0%}.")
        if self.worse:
            lines.append("If that is accepted, record it: pallas-hub aot KERNEL --update, and commit the file.")
        return "\n".join(lines)


def numbers(report: Report) -> dict[str, Any]:
    """What is compared. A program that does not compile has a status and nothing else."""
    if report.status != "compiled":
        return {"status": report.status}
    return {
        "status": report.status,
        "bundles": sum(kernel.step_bundles for kernel in report.kernels),
        "spills": report.spills,
        "vmem_bytes": max((kernel.vmem_bytes for kernel in report.kernels), default=0),
        "bytes": report.bytes,
        "steps": sum(kernel.steps or 0 for kernel in report.kernels),
    }


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Checked:
    """Both map case/op/target to numbers. What only one of them has is not compared, unless it stopped compiling."""
    worse, better, compared = [], [], 0
    for key, found in new.items():
        before = old.get(key)
        if before is None:
            continue
        if before["status"] != found["status"]:
            compared += 1
            line = f"{key}: was {before['status']}, now {found['status']}"
            gain = _RANK.get(found["status"], 0) - _RANK.get(before["status"], 0)
            (worse if gain < 0 else better).append(line)
        for name, slack in _SLACK.items():
            was, now = before.get(name), found.get(name)
            if was is None or now is None:
                if was is not None and found["status"] == "compiled":
                    worse.append(f"{key}: {name} was {was}, now unknown")
                continue
            compared += 1
            if now > was * (1 + TOLERANCE) and now > was + slack:
                worse.append(f"{key}: {name} {was} -> {now} ({_change(was, now)})")
            elif now < was * (1 - TOLERANCE) and now < was - slack:
                better.append(f"{key}: better: {name} {was} -> {now} ({_change(was, now)})")
    return Checked(tuple(worse), tuple(better), compared)


def check(kernel: str, targets: Sequence[str], names: Sequence[str], ops: Sequence[str], **options: Any) -> Checked:
    """Compile what the committed file has of these workloads, and compare.

    Raises   ValueError: no baseline for this kernel, or nothing in it for these workloads.
    """
    recorded = read(kernel)
    known = recorded["numbers"]
    new = _compile(kernel, targets, names, ops, options, only=known)
    if not new:
        raise ValueError(f"the baseline of {kernel} has nothing for these workloads and targets; record it: --update.")
    found = compare(known, new)
    gone = [
        f"{key}: recorded, but {kernel} has no such workload: renamed? --update drops it"
        for key in sorted(known.keys() - _all_keys(kernel))
        if _is_asked_for(key, targets, names, ops)
    ]
    unrecorded = len(targets) * len(choose_workloads(kernel, names, ops)) - len(new)
    said = f"the baseline was recorded with {recorded['versions']}, this is {_versions()}: differences may be theirs."
    said = "" if recorded["versions"] == _versions() else said
    return Checked((*found.worse, *gone), found.better, found.compared, said, unrecorded)


def update(kernel: str, targets: Sequence[str], names: Sequence[str], ops: Sequence[str], **options: Any) -> Path:
    """Record the numbers of these workloads; entries of the kernel's other workloads stay.

    Raises   ValueError: one crashed or ran out of time, which no later check could be held against.
    """
    path = FOLDER / f"{kernel}.json"
    if path.is_file():
        read(kernel)  # a broken file is told before anything is compiled
    found = _compile(kernel, targets, names, ops, options)
    lost = [f"{key} {one['status']}" for key, one in found.items() if one["status"] in ("crashed", "timed out")]
    if lost:
        raise ValueError(
            f"nothing is recorded: {', '.join(lost)}; try again with a longer --timeout or fewer --workers, or leave "
            "it out by --workload, --op and --target (what did compile is in the cache)."
        )
    with alone_in(FOLDER):
        old = read(kernel)["numbers"] if path.is_file() else {}
        known = _all_keys(kernel)
        merged = {key: one for key, one in old.items() if key in known} | found
        body = ",\n".join(f"    {json.dumps(key)}: {json.dumps(merged[key])}" for key in sorted(merged))
        replace_text(
            path,
            f'{{\n  "kernel": "{kernel}",\n  "versions": {json.dumps(_versions())},\n'
            f'  "numbers": {{\n{body}\n  }}\n}}\n',
        )
    return path


def read(kernel: str) -> dict[str, Any]:
    """The committed file.

    Raises   ValueError: there is none, or it is not of this form.
    """
    path = FOLDER / f"{kernel}.json"
    if not path.is_file():
        raise ValueError(f"no baseline for {kernel!r} at {path}; record one: pallas-hub aot {kernel} --update.")
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        if all("status" in numbers for numbers in recorded["numbers"].values()) and recorded["versions"]:
            return recorded
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path} is not a baseline; restore it, or delete it and record one: --update.")


def _versions() -> dict[str, str]:
    return {name: version for name, version in versions().items() if name != "tokamax"}


def _compile(
    kernel: str,
    targets: Sequence[str],
    names: Sequence[str],
    ops: Sequence[str],
    options: dict[str, Any],
    only: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    wishes = [
        own_wish(kernel, workload, target)
        for target in targets
        for workload in choose_workloads(kernel, names, ops)
        if only is None or _key(workload, target) in only
    ]
    # What XLA does around the kernels is not compared.
    reports = compile_wishes(wishes, around=False, **options)
    return {_key(wish.workload, wish.target): numbers(report) for wish, report in zip(wishes, reports, strict=True)}


def _key(workload: Workload, target: str) -> str:
    return f"{workload.case}/{workload.op}/{target}"


def _all_keys(kernel: str) -> set[str]:
    return {_key(workload, target) for target in HARDWARE for workload in choose_workloads(kernel)}


def _is_asked_for(key: str, targets: Sequence[str], names: Sequence[str], ops: Sequence[str]) -> bool:
    case, op, target = [*key.rsplit("/", 2), "", ""][:3]
    return target in targets and (not ops or op in ops) and (not names or any(name in case for name in names))


def _change(was: float, now: float) -> str:
    return f"{(now - was) / was:+.1%}" if was else f"+{now}"
