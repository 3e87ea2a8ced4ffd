"""Find a kernel and what it depends on, on the Hub or in its cache, and settle trust, before any code is downloaded."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_hub.registry import hub
from pallas_hub.registry.answers import plain_errors
from pallas_hub.registry.digests import promised
from pallas_hub.registry.errors import LoadError, NoMatchingVariant, UnknownKernel, UnknownVersion
from pallas_hub.registry.paths import Sources
from pallas_hub.registry.trust import Trust, reason_to_trust


@dataclass
class Resolver:
    """A resolver in the sense of the kernels library, for a kernel and for each kernel it depends on."""

    trust: Trust
    sources: Sources
    from_cache: bool = False
    locks: Any = None  # kernels._rust.KernelLocks
    reasons: dict[Path | tuple[str, str], str] = field(default_factory=dict)
    refs: dict[tuple[str, str], str] = field(default_factory=dict)
    known: dict[tuple[str, int | None], str] = field(default_factory=dict)  # commits that were looked up already

    def resolve(self, *, api: Any, backend: str | None, kernel: Any) -> Any:
        with plain_errors(kernel.repo_id):  # names the kernel at fault, which may be one that the asked one depends on
            return self._resolve(api, backend, kernel)

    def _resolve(self, api: Any, backend: str | None, kernel: Any) -> Any:
        from kernels._rust import KernelVersion
        from kernels.load import _get_local_kernel_overrides
        from kernels.resolver import LocalKernel

        override = _get_local_kernel_overrides().resolve(api=api, backend=backend, kernel=kernel)
        if override is not None:
            assert isinstance(override, LocalKernel)
            self.reasons[override.variant_path] = "LOCAL_KERNELS names this folder"
            return override
        spec = kernel.version
        version = spec.version if isinstance(spec, KernelVersion.Version) else None
        revision = spec.revision if isinstance(spec, KernelVersion.Revision) else None
        if self.locks is not None:
            commit = hub.locked_commit(self.locks, kernel)
        else:
            commit = self.known.get((kernel.repo_id, version)) or hub.find_commit(
                api, kernel.repo_id, version, revision, from_cache=self.from_cache
            )
        if version is not None and self.locks is None:
            self.refs[kernel.repo_id, commit] = f"v{version}"
        elif revision is not None and revision != commit:
            self.refs[kernel.repo_id, commit] = revision
        find = _find_in_cache if self.from_cache else _find_on_hub
        location, metadata = find(api, kernel.repo_id, commit, backend)
        if version is not None and metadata.get("version") not in (None, version):
            raise LoadError(
                f"{kernel.repo_id}: v{version} (commit {commit[:12]}) holds a build of version {metadata['version']}; "
                "its publisher has to repair it. Choose another version, or name the commit with revision=."
            )
        self.reasons[kernel.repo_id, commit] = reason_to_trust(kernel.repo_id, metadata, self.trust, self.sources)
        return location


def _find_on_hub(api: Any, repo_id: str, commit: str, backend: str | None) -> tuple[Any, dict]:
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError
    from kernels.hf_hub import CACHE_DIR
    from kernels.resolver import resolve_hub_kernel
    from kernels.variants import get_variants

    try:
        try:
            location = resolve_hub_kernel(repo_id, api=api, revision=commit, backend=backend)
        except (FileNotFoundError, ValueError):
            _refuse_unless_one_fits(repo_id, commit, get_variants(api, repo_id=repo_id, revision=commit), backend)
            raise
    except RevisionNotFoundError as error:
        raise UnknownVersion(f"{repo_id} has no commit {commit}.") from error
    except EntryNotFoundError as error:
        what = "metadata.json in its variant" if "metadata.json" in str(error) else "build/ folder"
        raise NoMatchingVariant(
            f"{repo_id} (commit {commit[:12]}) holds no {what}: it is not a kernel repo, or was built by old tools."
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

    build = hub.cache_folder(repo_id) / "snapshots" / commit / "build"
    offered = get_variants_local(build)
    mend = f"While online, run: pallas-hub download {repo_id} --revision {commit}"
    if not offered:
        raise UnknownKernel(f"{repo_id} (commit {commit[:12]}) is not in the cache: {build} holds no variant. {mend}")
    _refuse_unless_one_fits(repo_id, commit, offered, backend)
    variant, _ = resolve_variant(offered, backend)
    assert variant is not None, "refused above"
    folder = build / variant.variant_str
    path = folder / "metadata.json"
    if not path.is_file():
        raise UnknownKernel(f"{repo_id} (commit {commit[:12]}) is only partly in the cache: no {path}. {mend}")
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
        raise NoMatchingVariant(f"{repo_id}: {error}. Variants in commit {commit[:12]}: {', '.join(names)}.") from error
    accepted, decisions = resolve_variants(offered, backend)
    if accepted:
        return
    width = max(map(len, names), default=0)
    reasons = {item.variant.variant_str: item.reason for item in decisions if isinstance(item, VariantRejected)}
    lines = [f"  {name:<{width}}  rejected: {reasons[name]}" for name in sorted(reasons)] or ["  (no variants at all)"]
    raise NoMatchingVariant(
        f"{repo_id} (commit {commit[:12]}) has no build for this machine (backend {chosen}, torch {torch.__version__}, "
        f"{platform.machine()} {platform.system().lower()}):\n"
        + "\n".join(lines)
        + "\nAsk its authors for one of these "
        f"backends, or choose another version: pallas-hub info {repo_id}"
    )
