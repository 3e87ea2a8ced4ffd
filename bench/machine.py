"""What a benchmark ran on: the header that stands above every table."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_DEFAULT_CACHE_BYTES = 64 * 2**20  # where the system does not say; larger than most
_PACKAGES = ("torch", "jax", "transformers", "kernels", "pallas-hub")


def describe_machine() -> dict[str, Any]:
    """Device, threads, versions, commit and date, as plain JSON values."""
    import torch

    return {
        "measured_on": "CPU",
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "commit": commit_of(Path(__file__).resolve().parent),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def header_lines(machine: dict[str, Any]) -> list[str]:
    """The same facts as three lines for people."""
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in machine["versions"].items())
    load = machine["load_average_1min"]
    lines = [
        f"measured on {machine['measured_on']}: {machine['cpu']}, {machine['torch_threads']} torch threads on "
        f"{machine['cpus']} cores, last-level cache {machine['last_level_cache_bytes'] / 2**20:.0f} MiB",
        f"Python {machine['python']}, {versions}",
        f"commit {machine['commit'] or 'unknown'}, {machine['date']}",
    ]
    if "kernel" in machine:
        lines.append(f"kernel {machine['kernel']}")
    if load is not None and load > 0.5 * (machine["cpus"] or 1):
        lines.append(f"the machine was busy before the run (load average {load}): expect wide spreads")
    return lines


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def last_level_cache_bytes() -> int:
    """Size of the largest CPU cache that the system reports."""
    sizes = []
    for entry in _CACHES.glob("index*/size"):
        text = entry.read_text().strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


def available_memory_bytes() -> int | None:
    """Memory that can be taken without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def commit_of(folder: Path) -> str | None:
    """Short commit of the checkout that holds `folder`, with `+changes` when files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
