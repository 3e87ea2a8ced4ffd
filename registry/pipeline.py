"""From a request to a loaded kernel of the Hub or its cache: resolve, validate, fetch, verify, import."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pallas_hub.registry import fetch, hub, importer
from pallas_hub.registry.answers import plain_errors
from pallas_hub.registry.digests import promised, read_metadata, tree_digest, verify_variant
from pallas_hub.registry.errors import (
    DigestMismatch,
    LoadError,
    LockError,
    UnknownKernel,
    UnknownVersion,
)
from pallas_hub.registry.importer import LoadedFrom
from pallas_hub.registry.lock import read_lock
from pallas_hub.registry.paths import OUR_SOURCES, Sources
from pallas_hub.registry.resolve import Resolver
from pallas_hub.registry.trust import Trust


@dataclass(frozen=True)
class Request:
    """What the caller of `get_kernel` asked for."""

    repo_id: str
    version: int | None
    revision: str | None
    backend: str | None
    trust: Trust
    lockfile: Path | None = None
    user_agent: str | dict | None = None
    check_arch: bool = True
    sources: Sources = OUR_SOURCES


def load_remote(request: Request, *, from_cache: bool) -> ModuleType:
    api, tree, resolver, request = resolve(request, from_cache=from_cache)
    _validate(tree, request)
    tree = _install(api, tree, resolver, request)
    with importer.load_lock:
        for node in fetch.walk(tree):
            _import_node(node, resolver, from_cache)
        return tree.load()  # the kernels library finds every module loaded; only the dependency tree is its own


def resolve(request: Request, *, from_cache: bool) -> tuple[Any, Any, Resolver, Request]:
    """(api, dependency tree, resolver, request with its version filled in). Trust is settled for the whole tree."""
    from kernels.deps import resolve_kernel_tree

    api = hub.client(request.user_agent)
    resolver = Resolver(request.trust, request.sources, from_cache=from_cache)
    with plain_errors(request.repo_id):
        if request.lockfile is not None:
            resolver.locks, kernel = _read_lock(request, request.lockfile)
        else:
            if request.version is None and request.revision is None:
                version, commit = _newest(request.repo_id, from_cache)
                resolver.known[request.repo_id, version] = commit
                request = replace(request, version=version)
            kernel = _dependency(request)
        tree = resolve_kernel_tree(api=api, kernel=kernel, backend=request.backend, resolver=resolver)
    return api, tree, resolver, request


def _dependency(request: Request) -> Any:
    from kernels._rust import KernelDependency, KernelVersion

    if request.revision is not None:
        return KernelDependency(repo_id=request.repo_id, version=KernelVersion.Revision(request.revision))
    assert request.version is not None
    return KernelDependency(repo_id=request.repo_id, version=KernelVersion.Version(request.version))


def _validate(tree: Any, request: Request) -> None:
    from kernels.validate import AllValidator, ArchValidator, default_metadata_validators

    validators: list = default_metadata_validators()
    if request.check_arch:
        validators.append(ArchValidator())
    try:
        tree.validate_metadata(AllValidator(validators=validators))
    except (RuntimeError, ValueError, ImportError) as error:
        text = f"{request.repo_id}: {error}".rstrip(" .") + "."
        if "unsupported kernel dependency" in text:
            text += " The kernels library refuses that package; its publisher has to drop it from python-depends."
        raise LoadError(text) from error


def _install(api: Any, tree: Any, resolver: Resolver, request: Request, force: bool = False) -> Any:
    """Download and verify the tree. What was damaged while this call fetched it is fetched once more."""
    with plain_errors(request.repo_id):
        local, fresh = fetch.install(api, tree, resolver, force=force)
    try:
        for node in fetch.walk(local):
            _verify(node)
    except DigestMismatch:
        if force or not fresh:
            raise
        return _install(api, tree, resolver, request, force=True)
    return local


def _verify(node: Any) -> None:
    """Compare the files on disk with the promise in metadata.json, if the repo makes one."""
    folder = node.location.variant_path
    promise = promised(read_metadata(folder))
    if promise is None:
        return
    origin = node.location.origin
    mend = "Build it again."
    if origin is not None:
        fetch = f"pallas-hub download {origin.repo_id} --revision {origin.revision} --force"
        mend = f"Fetch it again: {fetch}. If that does not help, the repo itself is damaged or was tampered with."
    verify_variant(folder, promise[1], mend=mend, algorithm=promise[0])


def _import_node(node: Any, resolver: Resolver, from_cache: bool) -> None:
    """Import one verified node, whose dependencies are loaded, and enter it in the kernels library's register.

    The library itself would import it with Python's own loader, which prefers a stale or planted __pycache__ over the
    source that was verified. Without a promise in metadata.json there is nothing to verify, and it does import it.
    """
    from kernels.deps import use_kernel_deps
    from kernels.importer import LoadedKernel, RepoInfo, _loaded_kernels

    location, metadata = node.location, read_metadata(node.location.variant_path)
    folder, repo, module_id = location.variant_path, location.origin, location.metadata.id
    if not module_id or "." in module_id:
        raise LoadError(f"{folder}: the id in metadata.json must be the name of a module; got {module_id!r}.")
    promise = promised(metadata)
    digest = tree_digest(promise[1]) if promise and promise[0] == "sha256" else None
    module = importer.already_loaded(module_id, digest, folder)
    if module is None and promise is not None:
        inside = "" if (folder / "__init__.py").exists() else f"{location.metadata.name.python_name}/"
        importer.register_verified(module_id, folder, promise[1], algorithm=promise[0], inside=inside)
        with use_kernel_deps({repo_id: dependency.load() for repo_id, dependency in node.deps.items()}):
            module = importer.import_verified(module_id)
    if module is None:
        node.load()
    else:
        info = RepoInfo(repo_id=repo.repo_id, revision=repo.revision) if repo else None
        known = LoadedKernel(metadata=location.metadata, module=module, repo_info=info)
        _loaded_kernels.setdefault(folder, known)
    origin = LoadedFrom(
        name=str(location.metadata.name),
        repo_id=repo.repo_id if repo else str(location.metadata.name),
        version=location.metadata.version,
        commit=repo.revision if repo else None,
        source=("cache" if from_cache else "hub") if repo else "local",
        variant=location.variant_str,
        trust=resolver.reasons[(repo.repo_id, repo.revision) if repo else folder],
        path=folder,
        digest=digest,
    )
    importer.record(module_id, origin)


def _newest(repo_id: str, from_cache: bool) -> tuple[int, str]:
    """(version, commit) of the newest version."""
    known = hub.versions(repo_id, from_cache=from_cache)
    if known:
        return max(known.items())
    if from_cache:
        raise UnknownKernel(f"{repo_id} is not in the cache {hub.cache_folder(repo_id)}.")
    raise UnknownVersion(f"{repo_id} exists on {hub.endpoint()} but has no version branch (v1, v2, ...).")


def _read_lock(request: Request, lockfile: Path) -> tuple[Any, Any]:
    locks = read_lock(lockfile)
    held = [dependency for dependency in locks if dependency.repo_id == request.repo_id]
    if request.version is not None:
        held = [dependency for dependency in held if getattr(dependency.version, "version", None) == request.version]
    if not held:
        wanted = request.repo_id + (f" version {request.version}" if request.version is not None else "")
        raise LockError(
            f"{lockfile}: does not hold {wanted}; it holds "
            f"{', '.join(sorted(dependency.repo_id for dependency in locks)) or 'nothing'}. Lock it: pallas-hub lock"
        )
    return locks, held[0]
