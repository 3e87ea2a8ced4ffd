"""`get_kernel`: find, fetch, verify and load a kernel from the Hub, its cache, or the copy that ships with the package."""

import errno
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pallas_hub.registry import hub, importer
from pallas_hub.registry.digests import promised, read_metadata, tree_digest, verify_variant
from pallas_hub.registry.errors import (
    DigestMismatch,
    HubUnavailable,
    KernelsLibraryError,
    LoadError,
    LockError,
    NoMatchingVariant,
    PallasHubError,
    UnknownKernel,
    UnknownVersion,
)
from pallas_hub.registry.importer import LoadedFrom, loaded_from
from pallas_hub.registry.local import load_local, load_source
from pallas_hub.registry.manifest import Manifest, read_all
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id
from pallas_hub.registry.source import read_source
from pallas_hub.registry.trust import Trust

__all__ = ["LoadedFrom", "get_kernel", "has_kernel", "list_kernels", "load_source", "loaded_from"]


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


def get_kernel(
    repo_id: str,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    trust_remote_code: bool | list[str] = False,
    lockfile: str | Path | None = None,
    names: Iterable[str] = (),
    user_agent: str | dict | None = None,
    check_arch: bool = True,
    sources: Sources = OUR_SOURCES,
) -> ModuleType:
    """Load a kernel by its repo id, as `kernels.get_kernel` does, after verifying every file.

    Looks on the Hub (HF_ENDPOINT), then in the Hub's cache, then at the copy bundled with the package; with
    HF_HUB_OFFLINE=1 the Hub is left out. `loaded_from(module)` tells which one it was.

    version             major version; the newest one if neither `version` nor `revision` is given
    trust_remote_code   needed for anything but released builds of ours: True (also covers what the kernel depends on),
                        or a list of exact repo ids
    lockfile            load the commit locked there by `pallas-hub lock` or `kernels lock`
    names               names that the kernel must export; a missing one is reported now, not at its first call
    sources             a shelf of kernels and manifests of your own, to use and trust in place of the package's

    Raises   PallasHubError: the message names what was looked for, what exists and what to do.
    """
    request = Request(
        repo_id=check_repo_id(repo_id),
        version=_check_version(version, revision),
        revision=revision,
        backend=backend,
        trust=Trust.parse(trust_remote_code),
        lockfile=Path(lockfile) if lockfile is not None else None,
        user_agent=user_agent,
        check_arch=check_arch,
        sources=sources,
    )
    _refuse_inside_compile(repo_id)
    module = _load(request)
    _require_names(module, names)
    return module


def has_kernel(repo_id: str, **where: Any) -> bool:
    """True if `get_kernel(repo_id, ...)` would find a build for this machine. Nothing is loaded, trust is not asked.

    Raises   HubUnavailable: the Hub cannot be reached and nothing local can answer.
    """
    request = Request(
        repo_id=check_repo_id(repo_id),
        version=_check_version(where.get("version"), where.get("revision")),
        revision=where.get("revision"),
        backend=where.get("backend"),
        trust=Trust(everything=True),
        sources=where.get("sources", OUR_SOURCES),
    )
    try:
        hub.require_kernels()
        _resolve(request, from_cache=hub.is_offline())
        return True
    except (UnknownVersion, NoMatchingVariant):
        return hub.is_offline() and _bundled(request) is not None
    except (UnknownKernel, HubUnavailable, KernelsLibraryError) as error:
        if _bundled(request) is not None:
            return True
        if isinstance(error, HubUnavailable):
            raise
        return False


def list_kernels(sources: Sources = OUR_SOURCES) -> list[Manifest]:
    """The kernels that this package publishes, from hub_manifests/. No network."""
    return read_all(sources)


def _load(request: Request) -> ModuleType:
    try:
        hub.require_kernels()
    except KernelsLibraryError as error:
        return _load_bundled(request, error)
    if not hub.is_offline():
        try:
            return _load_remote(request, from_cache=False)
        except UnknownKernel as error:
            return _load_bundled(request, error)
        except HubUnavailable as error:
            away = error
    else:
        away = HubUnavailable(
            f"{request.repo_id}: HF_HUB_OFFLINE=1, so only the cache and the bundled copy were tried"
        )
    try:
        return _load_remote(request, from_cache=True)
    except (UnknownKernel, UnknownVersion) as error:
        return _load_bundled(request, HubUnavailable(f"{away} {error}"))


def _load_bundled(request: Request, reason: PallasHubError) -> ModuleType:
    """The copy of the kernel that ships with the package, or `reason` if there is none that fits the request."""
    source = _bundled(request)
    if source is None:
        raise reason
    importer.logger.info("%s: using the bundled copy, because: %s", request.repo_id, reason)
    return load_local(source, request.backend, kind="bundled", trust="bundled with pallas_hub")


def _bundled(request: Request) -> Any:
    # A lock or a revision asks for exact bytes from the Hub; the bundled copy must not stand in for them.
    if request.lockfile is not None or request.revision is not None:
        return None
    name = request.repo_id.split("/")[1]
    if name not in request.sources.names():
        return None
    source = read_source(name, request.sources)
    return source if request.version in (None, source.version) and source.repo_id == request.repo_id else None


def _resolve(request: Request, *, from_cache: bool) -> tuple[Any, Any, hub.Resolver, Request]:
    """(api, dependency tree, resolver, request with its version filled in), with the library's errors in our words."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from kernels._rust import KernelDependency, KernelVersion
    from kernels.deps import resolve_kernel_tree
    from kernels.hf_hub import _get_hf_api

    api = _get_hf_api(user_agent=request.user_agent)
    locks = None
    try:
        if request.lockfile is not None:
            locks, kernel = _read_lock(request)
        else:
            if request.version is None and request.revision is None:
                request = replace(request, version=_newest(request.repo_id, from_cache))
            spec = (
                KernelVersion.Revision(request.revision)
                if request.revision is not None
                else KernelVersion.Version(request.version)
            )
            kernel = KernelDependency(repo_id=request.repo_id, version=spec)
        resolver = hub.Resolver(request.trust, request.sources, from_cache=from_cache, locks=locks)
        tree = resolve_kernel_tree(api=api, kernel=kernel, backend=request.backend, resolver=resolver)
    except GatedRepoError as error:
        raise UnknownKernel(
            f"{request.repo_id}: you have no access to this gated repo; ask for it on the Hub."
        ) from error
    except RepositoryNotFoundError as error:
        raise UnknownKernel(
            f"{request.repo_id}: no kernel repo of that name on {hub.endpoint()} (or a private one and no token). "
            f"Kernels of this package: {', '.join(sorted(m.repo_id for m in read_all(request.sources))) or 'none'}."
        ) from error
    except PallasHubError:
        raise
    except Exception as error:
        if hub.unreachable(error):
            raise hub.unavailable(request.repo_id, error) from error
        raise
    return api, tree, resolver, request


def _load_remote(request: Request, *, from_cache: bool) -> ModuleType:
    api, tree, resolver, request = _resolve(request, from_cache=from_cache)
    _validate(tree, request)
    tree = _install(api, tree, resolver, request)
    with importer.load_lock:
        origins = [_prepare(node, resolver, from_cache) for node in hub.walk(tree)]
        module_id = tree.location.metadata.id
        module = importer.import_verified(module_id, tree.load)
        for node_id, origin in origins:
            importer.record(node_id, origin)
    return module


def _validate(tree: Any, request: Request) -> None:
    from kernels.validate import AllValidator, ArchValidator, default_metadata_validators

    validators: list = default_metadata_validators()
    if request.check_arch:
        validators.append(ArchValidator())
    try:
        tree.validate_metadata(AllValidator(validators=validators))
    except (RuntimeError, ValueError, ImportError) as error:
        raise LoadError(f"{request.repo_id}: {error}") from error


def _install(api: Any, tree: Any, resolver: hub.Resolver, request: Request, force: bool = False) -> Any:
    """Download and verify the tree. What was damaged while this call fetched it is fetched once more."""
    try:
        local, fresh = hub.install(api, tree, resolver, force=force)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LoadError(
                f"{request.repo_id}: no room left in {hub.cache_folder(request.repo_id)}; nothing was loaded. Free some "
                "space, or point HF_HUB_CACHE elsewhere."
            ) from error
        if hub.unreachable(error):
            raise hub.unavailable(request.repo_id, error, extra=" in the middle of a download") from error
        raise
    except Exception as error:
        if hub.unreachable(error):
            raise hub.unavailable(request.repo_id, error, extra=" in the middle of a download") from error
        raise
    try:
        for node in hub.walk(local):
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


def _prepare(node: Any, resolver: hub.Resolver, from_cache: bool) -> tuple[str, LoadedFrom]:
    """Get one verified node ready for import, and write down where it came from."""
    from kernels.importer import LoadedKernel, RepoInfo, _loaded_kernels

    location, metadata = node.location, read_metadata(node.location.variant_path)
    promise = promised(metadata)
    digest = tree_digest(promise[1]) if promise and promise[0] == "sha256" else None
    repo, module_id = location.origin, location.metadata.id
    origin = LoadedFrom(
        name=str(location.metadata.name),
        repo_id=repo.repo_id if repo else str(location.metadata.name),
        version=location.metadata.version,
        commit=repo.revision if repo else None,
        source=("cache" if from_cache else "hub") if repo else "local",
        variant=location.variant_str,
        trust=resolver.reasons[(repo.repo_id, repo.revision) if repo else location.variant_path],
        path=location.variant_path,
        digest=digest,
    )
    existing = importer.already_loaded(module_id, digest, location.variant_path)
    if existing is not None:
        # The kernels library knows modules by folder; tell it that these files are loaded, or it would run them again.
        info = RepoInfo(repo_id=repo.repo_id, revision=repo.revision) if repo else None
        known = LoadedKernel(metadata=location.metadata, module=existing, repo_info=info)
        _loaded_kernels.setdefault(location.variant_path, known)
    elif promise is not None:
        importer.register_verified(module_id, location.variant_path, promise[1], promise[0])
    return module_id, origin


def _newest(repo_id: str, from_cache: bool) -> int:
    known = hub.versions(repo_id, from_cache=from_cache)
    if known:
        return max(known)
    if from_cache:
        raise UnknownKernel(f"{repo_id} is not in the cache {hub.cache_folder(repo_id)}.")
    raise UnknownVersion(f"{repo_id} exists on {hub.endpoint()} but has no version branch (v1, v2, ...).")


def _read_lock(request: Request) -> tuple[Any, Any]:
    from pallas_hub.registry.lock import read_lock

    locks = read_lock(request.lockfile)
    held = [dependency for dependency in locks if dependency.repo_id == request.repo_id]
    if request.version is not None:
        held = [
            dependency
            for dependency in held
            if getattr(dependency.version, "version", None) == request.version
        ]
    if not held:
        wanted = request.repo_id + (f" version {request.version}" if request.version is not None else "")
        raise LockError(
            f"{request.lockfile}: does not hold {wanted}; it holds "
            f"{', '.join(sorted(dependency.repo_id for dependency in locks)) or 'nothing'}. Lock it: pallas-hub lock"
        )
    return locks, held[0]


def _check_version(version: int | None, revision: str | None) -> int | None:
    if version is not None and revision is not None:
        raise UnknownVersion(
            f"give version or revision, not both; got version={version!r} and revision={revision!r}."
        )
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
        raise UnknownVersion(f"version must be a whole number such as 1 (branch v1); got {version!r}.")
    return version


def _require_names(module: ModuleType, names: Iterable[str]) -> None:
    if isinstance(names, str):
        raise LoadError(f"names must be a list of names, as in [{names!r}]; got the string {names!r}.")
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        exported = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        raise LoadError(
            f"{loaded_from(module)}: does not export {', '.join(missing)}; it exports {', '.join(sorted(exported))}."
        )


def _refuse_inside_compile(repo_id: str) -> None:
    import torch

    if torch.compiler.is_compiling():
        raise LoadError(
            f"{repo_id}: get_kernel was called inside a compiled function; load the kernel before compiling."
        )
