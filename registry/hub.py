"""Find and fetch kernels through the `kernels` library: from the Hub, or from the Hub's local cache.

Differences from `kernels.get_kernel`, which this is built on: trust is settled per repo before code is downloaded, a
small repo is fetched whole and its version is written into the cache's refs (so that offline use works afterwards),
and every refusal lists what exists.

On a TPU host kernels 0.17 picks torch-cpu, because it looks for torch.backends.tpu, which torch_tpu 0.2 does not set.
That is left as it is: every variant of our kernels holds the same Python and decides by the tensor's device.
"""

import importlib.metadata
import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_hub.registry.digests import promised
from pallas_hub.registry.errors import (
    HubUnavailable,
    KernelsLibraryError,
    LockError,
    NoMatchingVariant,
    UnknownKernel,
    UnknownVersion,
)
from pallas_hub.registry.paths import Sources
from pallas_hub.registry.trust import Trust, reason_to_trust

# Internals of the library are used (resolvers, dependency tree), so each minor version is tried before it is allowed.
SUPPORTED_KERNELS = ">=0.17.2,<0.18"

# Fetch a whole revision up to this size. Ours are below 2 MiB; repos with compiled variants reach gigabytes.
WHOLE_REVISION_LIMIT = 32 * 2**20

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAFE_REF = re.compile(r"[A-Za-z0-9_][\w-]*(\.[\w-]+)*(/[A-Za-z0-9_][\w-]*(\.[\w-]+)*)*")


def require_kernels() -> None:
    """Raise KernelsLibraryError unless the supported `kernels` library is installed."""
    from packaging.specifiers import SpecifierSet

    mend = f'Install it with: pip install "kernels{SUPPORTED_KERNELS}"'
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        raise KernelsLibraryError(
            f"the kernels library is not installed; pallas_hub needs kernels{SUPPORTED_KERNELS} to reach the Hub. {mend}"
        ) from None
    if version not in SpecifierSet(SUPPORTED_KERNELS):
        raise KernelsLibraryError(
            f"kernels {version} is installed; pallas_hub works with kernels{SUPPORTED_KERNELS}. {mend}"
        )


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def unreachable(error: BaseException | None) -> bool:
    """True if `error` means that the Hub did not answer, as opposed to answering no."""
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if any(
            kind.__name__ == "TransportError" for kind in type(error).__mro__
        ):  # httpx's family of network errors
            return True
        if getattr(getattr(error, "response", None), "status_code", 0) >= 500:
            return True
        error = error.__cause__
    return False


@dataclass
class Resolver:
    """A resolver in the sense of the kernels library, for a kernel and for each kernel it depends on."""

    trust: Trust
    sources: Sources
    from_cache: bool = False
    locks: Any = None  # kernels._rust.KernelLocks
    reasons: dict[Path | tuple[str, str], str] = field(default_factory=dict)
    refs: dict[tuple[str, str], str] = field(default_factory=dict)

    def resolve(self, *, api: Any, backend: str | None, kernel: Any) -> Any:
        from kernels._rust import KernelVersion
        from kernels.load import _get_local_kernel_overrides

        override = _get_local_kernel_overrides().resolve(api=api, backend=backend, kernel=kernel)
        if override is not None:
            self.reasons[override.variant_path] = "LOCAL_KERNELS names this folder"
            return override
        spec = kernel.version
        version = spec.version if isinstance(spec, KernelVersion.Version) else None
        revision = spec.revision if isinstance(spec, KernelVersion.Revision) else None
        if self.locks is not None:
            commit = locked_commit(self.locks, kernel)
        else:
            commit = find_commit(api, kernel.repo_id, version, revision, from_cache=self.from_cache)
        if version is not None and self.locks is None:
            self.refs[kernel.repo_id, commit] = f"v{version}"
        elif revision is not None and revision != commit:
            self.refs[kernel.repo_id, commit] = revision
        find = _find_in_cache if self.from_cache else _find_on_hub
        location, metadata = find(api, kernel.repo_id, commit, backend)
        self.reasons[kernel.repo_id, commit] = reason_to_trust(
            kernel.repo_id, metadata, self.trust, self.sources
        )
        return location


def versions(repo_id: str, *, from_cache: bool) -> dict[int, str]:
    """Version -> commit, from the branches v1, v2, ... of the repo or from the refs in the cache."""
    from kernels._versions import _get_available_versions

    found = _get_available_versions(repo_id, local_files_only=from_cache)
    return {number: ref.target_commit for number, ref in sorted(found.items())}


def find_commit(
    api: Any, repo_id: str, version: int | None, revision: str | None, *, from_cache: bool
) -> str:
    """The commit that a version or revision names now."""
    if revision is not None:
        return _commit_of_revision(api, repo_id, revision, from_cache)
    known = versions(repo_id, from_cache=from_cache)
    if version in known:
        return known[version]
    listed = ", ".join(f"v{number}" for number in known) or "none"
    if not from_cache:
        raise UnknownVersion(f"{repo_id} has no version {version}; versions on {endpoint()}: {listed}.")
    raise UnknownVersion(
        f"{repo_id} version {version} is not in the cache {cache_folder(repo_id)}; versions there: {listed}. "
        f"While online, run: pallas-hub download {repo_id} --version {version}"
    )


def locked_commit(locks: Any, kernel: Any) -> str:
    lock = locks.get(kernel)
    if lock is None:
        held = ", ".join(sorted(dependency.repo_id for dependency in locks)) or "nothing"
        raise LockError(
            f"{kernel.repo_id}: not in the lock file, which holds {held}. Lock it again: pallas-hub lock"
        )
    return lock.commit


def cache_folder(repo_id: str) -> Path:
    """The repo's folder in the Hub cache that the kernels library uses."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from kernels.hf_hub import CACHE_DIR

    return Path(CACHE_DIR or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="kernel")


def _commit_of_revision(api: Any, repo_id: str, revision: str, from_cache: bool) -> str:
    from huggingface_hub.errors import RevisionNotFoundError

    if from_cache:
        folder = cache_folder(repo_id)
        if _COMMIT.fullmatch(revision) and (folder / "snapshots" / revision).is_dir():
            return revision
        ref = folder / "refs" / revision
        if _SAFE_REF.fullmatch(revision) and ref.is_file():
            return ref.read_text().strip()
        raise UnknownVersion(
            f"{repo_id} revision {revision!r} is not in the cache {folder}. "
            f"While online, run: pallas-hub download {repo_id} --revision {revision}"
        )
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        return api.repo_info(repo_id, repo_type="kernel", revision=revision).sha
    except RevisionNotFoundError as error:
        listed = ", ".join(f"v{number}" for number in versions(repo_id, from_cache=False)) or "none"
        raise UnknownVersion(f"{repo_id} has no revision {revision!r}; versions: {listed}.") from error


def _find_on_hub(api: Any, repo_id: str, commit: str, backend: str | None) -> tuple[Any, dict]:
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError
    from kernels.hf_hub import CACHE_DIR
    from kernels.resolver import resolve_hub_kernel
    from kernels.variants import get_variants

    try:
        try:
            location = resolve_hub_kernel(repo_id, api=api, revision=commit, backend=backend)
        except (FileNotFoundError, ValueError):
            _refuse_unless_one_fits(
                repo_id, commit, get_variants(api, repo_id=repo_id, revision=commit), backend
            )
            raise
    except RevisionNotFoundError as error:
        raise UnknownVersion(f"{repo_id} has no commit {commit}.") from error
    except EntryNotFoundError as error:
        raise NoMatchingVariant(
            f"{repo_id} (commit {commit[:12]}) holds no build/ folder: it is not a kernel repo, or was not built yet."
        ) from error
    path = api.hf_hub_download(
        repo_id,
        repo_type="kernel",
        filename=f"build/{location.variant_str}/metadata.json",
        cache_dir=CACHE_DIR,
        revision=commit,
    )
    return location, json.loads(Path(path).read_bytes())


def _find_in_cache(api: Any, repo_id: str, commit: str, backend: str | None) -> tuple[Any, dict]:
    from kernels._rust import Metadata
    from kernels.resolver import LocalKernel, RemoteKernel
    from kernels.variants import get_variants_local, resolve_variant

    build = cache_folder(repo_id) / "snapshots" / commit / "build"
    offered = get_variants_local(build)
    mend = f"While online, run: pallas-hub download {repo_id} --revision {commit}"
    if not offered:
        raise UnknownKernel(
            f"{repo_id} (commit {commit[:12]}) is not in the cache: {build} holds no variant. {mend}"
        )
    _refuse_unless_one_fits(repo_id, commit, offered, backend)
    variant, _ = resolve_variant(offered, backend)
    folder = build / variant.variant_str
    path = folder / "metadata.json"
    if not path.is_file():
        raise UnknownKernel(
            f"{repo_id} (commit {commit[:12]}) is only partly in the cache: no {path}. {mend}"
        )
    text = json.loads(path.read_bytes())
    promise = promised(text)
    absent = [name for name in promise[1] if not (folder / name).exists()] if promise else []
    if absent:
        raise UnknownKernel(
            f"{repo_id} (commit {commit[:12]}) is only partly in the cache: {folder} lacks {', '.join(absent)}. {mend}"
        )
    metadata = Metadata.read_from_file(path)
    origin = RemoteKernel(repo_id=repo_id, revision=commit, metadata=metadata, variant=variant)
    return LocalKernel(variant_path=folder, metadata=metadata, origin=origin), text


def _refuse_unless_one_fits(repo_id: str, commit: str, offered: list, backend: str | None) -> None:
    """NoMatchingVariant, listing every variant with its reason, unless one fits this machine."""
    import platform

    import torch
    from kernels.backends import _select_backend
    from kernels.variants import VariantRejected, resolve_variants

    names = sorted(variant.variant_str for variant in offered)
    try:
        chosen = _select_backend(backend).name
    except ValueError as error:
        raise NoMatchingVariant(
            f"{repo_id}: {error}. Variants in commit {commit[:12]}: {', '.join(names)}."
        ) from error
    accepted, decisions = resolve_variants(offered, backend)
    if accepted:
        return
    width = max(map(len, names), default=0)
    reasons = {
        item.variant.variant_str: item.reason for item in decisions if isinstance(item, VariantRejected)
    }
    lines = [f"  {name:<{width}}  rejected: {reasons[name]}" for name in sorted(reasons)] or [
        "  (no variants at all)"
    ]
    raise NoMatchingVariant(
        f"{repo_id} (commit {commit[:12]}) has no build for this machine (backend {chosen}, torch {torch.__version__}, "
        f"{platform.machine()} {platform.system().lower()}):\n"
        + "\n".join(lines)
        + "\nAsk its authors for one of these "
        f"backends, or choose another version: pallas-hub info {repo_id}"
    )


def install(
    api: Any, tree: Any, resolver: Resolver, *, force: bool = False
) -> tuple[Any, set[tuple[str, str]]]:
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


def write_ref(repo_id: str, ref: str, commit: str) -> None:
    """Note in the cache which commit a version is, for offline use; huggingface_hub does so only for branch names."""
    if not _SAFE_REF.fullmatch(ref) or _COMMIT.fullmatch(ref):
        return
    path = cache_folder(repo_id) / "refs" / ref
    if path.is_file() and path.read_text() == commit:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as stream:
        stream.write(commit)
    os.replace(temporary, path)


def unavailable(repo_id: str, error: BaseException, extra: str = "") -> HubUnavailable:
    return HubUnavailable(
        f"{repo_id}: the Hub at {endpoint()} cannot be reached ({type(error).__name__}: {error}){extra}. Check the network "
        "and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use the cache alone."
    )
