"""Download resolved kernels into the Hub cache, in a way that also serves offline use afterwards."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pallas_hub.registry import hub
from pallas_hub.registry.resolve import Resolver

# Fetch a whole revision up to this size. Ours are below 2 MiB; repos with compiled variants reach gigabytes.
WHOLE_REVISION_LIMIT = 32 * 2**20


def install(api: Any, tree: Any, resolver: Resolver, *, force: bool = False) -> tuple[Any, set[tuple[str, str]]]:
    """Download what a resolved tree needs. Returns the local tree and the (repo, commit) pairs fetched just now."""
    from kernels.deps import DepTreeNode
    from kernels.resolver import LocalKernel

    fresh: set[tuple[str, str]] = set()
    dependencies = {}
    for repo_id, node in tree.deps.items():
        dependencies[repo_id], more = install(api, node, resolver, force=force)
        fresh |= more
    location = tree.location
    if not isinstance(location, LocalKernel):
        root, fetched = _fetch_revision(api, location, force)
        if fetched:
            fresh.add((location.repo_id, location.revision))
        ref = resolver.refs.get((location.repo_id, location.revision))
        if ref is not None:
            write_ref(location.repo_id, ref, location.revision)
        folder = root / "build" / location.variant_str
        location = LocalKernel(variant_path=folder, metadata=location.metadata, origin=location)
    return DepTreeNode(location=location, deps=dependencies), fresh


def walk(tree: Any) -> list[Any]:
    """Every node of a dependency tree, dependencies first."""
    return [node for dependency in tree.deps.values() for node in walk(dependency)] + [tree]


def _fetch_revision(api: Any, origin: Any, force: bool) -> tuple[Path, bool]:
    """Fetch the whole revision if it is small, else the variant. False if everything was in the cache already.

    The kernels library fetches one variant only, after which its offline mode finds the snapshot incomplete.
    """
    from kernels.hf_hub import CACHE_DIR
    from kernels.resolver import _BYTECODE_IGNORE_PATTERNS

    where = {
        "repo_id": origin.repo_id,
        "repo_type": "kernel",
        "revision": origin.revision,
        "cache_dir": CACHE_DIR,
        "ignore_patterns": _BYTECODE_IGNORE_PATTERNS,
    }
    if not force and (root := _whole_snapshot(api, where)) is not None:
        return root, False
    if force:
        discard_snapshot(origin.repo_id, origin.revision)
    entries = api.list_repo_tree(origin.repo_id, repo_type="kernel", revision=origin.revision, recursive=True)
    size = sum(getattr(entry, "size", None) or 0 for entry in entries)
    patterns = None if size <= WHOLE_REVISION_LIMIT else [f"build/{origin.variant_str}/*"]
    return Path(api.snapshot_download(**where, allow_patterns=patterns, force_download=force)), True


def _whole_snapshot(api: Any, where: dict) -> Path | None:
    """The cached snapshot, if the cache knows what it should hold and holds all of it."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    place = {key: where[key] for key in ("repo_id", "repo_type", "revision", "cache_dir")}
    try:
        get_cached_repo_tree(**place)
        return Path(api.snapshot_download(**where, local_files_only=True))
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        return None


def discard_snapshot(repo_id: str, commit: str) -> None:
    """Remove a snapshot's links, and any file put in their place, which force_download alone would keep."""
    folder = hub.cache_folder(repo_id) / "snapshots" / commit
    if not folder.is_dir():
        return
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".discarded-"))
    try:
        os.rename(folder, aside / "snapshot")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_ref(repo_id: str, ref: str, commit: str) -> None:
    """Note in the cache which commit a version is, for offline use; huggingface_hub does so only for branch names."""
    if not hub.SAFE_REF.fullmatch(ref) or hub.COMMIT.fullmatch(ref):
        return
    path = hub.cache_folder(repo_id) / "refs" / ref
    if path.is_file() and path.read_text() == commit:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as stream:
        stream.write(commit)
    os.replace(temporary, path)
