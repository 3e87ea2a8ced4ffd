"""Which commit a kernel's sources come from.

The answer is a function of the sources' own history (the last commit that touched them), not of HEAD, so commits
elsewhere in the repository do not change the bytes of a build.
"""

import subprocess
from pathlib import Path

from pallas_hub.registry.source import BUILDER_FORMAT, KernelSource


def provenance(source: KernelSource) -> dict:
    """The `provenance` entry of metadata.json; without a git checkout it names the builder alone."""
    entry: dict = {"kernel-builder": {"version": BUILDER_FORMAT}}
    paths = [str(path.resolve()) for path in (source.folder, source.bridge, *source.vendored)]
    commit = _git(source.folder, "log", "-1", "--format=%H", "--", *paths)
    shallow = _git(source.folder, "rev-parse", "--is-shallow-repository") == "true"  # its last commit may be another
    if commit and not shallow:
        dirty = _git(source.folder, "status", "--porcelain", "--", *paths)
        entry["kernel"] = {"commit": commit, "dirty": bool(dirty)}
    return entry


def is_dirty(source: KernelSource) -> bool:
    """True if the sources differ from their last commit."""
    return provenance(source).get("kernel", {}).get("dirty", False)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
