"""All findings in order, and how they are shown."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pallas_hub.doctor import devices, hub, packages
from pallas_hub.doctor.finding import Finding

_MARKS = {"ok": "ok    ", "note": "note  ", "broken": "BROKEN"}


def diagnose(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Look at versions, devices, variants, the Hub, the caches and the variables."""
    environ = os.environ if environ is None else environ
    installed = packages.installed_versions()
    chips = devices.tpu_chips()
    return [
        *packages.check_packages(installed),
        *devices.check_devices(installed, chips=chips),
        devices.kernels_variant(installed, chips),
        devices.our_variant(installed),
        *hub.check_hub(environ),
        *hub.check_variables(environ),
        *hub.check_telemetry(environ, installed.get("kernels")),
    ]


def text(findings: list[Finding]) -> str:
    """One line per finding, grouped; mends stand under what they mend."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        words = f"  ({finding.words})" if finding.words else ""
        lines.append(f"  {_MARKS[finding.verdict]}  {finding.name:<{width}}  {finding.value}{words}")
        if finding.verdict != "ok" and finding.mend:
            lines.append(f"  {'':<{width + 10}}mend: {finding.mend}")
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: list[Finding]) -> str:
    broken = [finding.name for finding in findings if finding.verdict == "broken"]
    if broken:
        return f"{len(broken)} broken: {', '.join(broken)}"
    notes = sum(finding.verdict == "note" for finding in findings)
    return f"nothing is broken; {notes} note{'' if notes == 1 else 's'}"
