"""`get_kernel`: load a kernel from the Hub, from its cache, or from the copy that ships with the package."""

import logging
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from pallas_hub.registry import hub, importer
from pallas_hub.registry.errors import (
    HubUnavailable,
    KernelsLibraryError,
    LoadError,
    NoMatchingVariant,
    NotTrusted,
    PallasHubError,
    UnknownKernel,
    UnknownVersion,
)
from pallas_hub.registry.importer import LoadedFrom, loaded_from
from pallas_hub.registry.local import load_local, load_source
from pallas_hub.registry.manifest import Manifest, read_all
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id, check_revision, check_version
from pallas_hub.registry.pipeline import Request, load_remote, resolve
from pallas_hub.registry.source import KernelSource, read_source
from pallas_hub.registry.trust import Trust

__all__ = ["LoadedFrom", "get_kernel", "has_kernel", "list_kernels", "load_source", "loaded_from"]


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


def has_kernel(
    repo_id: str,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    sources: Sources = OUR_SOURCES,
) -> bool:
    """True if `get_kernel(repo_id, ...)` would find a build for this machine. Nothing is loaded, trust is not asked.

    Raises   HubUnavailable: the Hub cannot be reached and nothing local can answer.
    """
    request = Request(
        repo_id=check_repo_id(repo_id),
        version=_check_version(version, revision),
        revision=revision,
        backend=backend,
        trust=Trust(everything=True),
        sources=sources,
    )
    away = None
    try:
        hub.require_kernels()
        for from_cache in (True,) if hub.is_offline() else (False, True):
            try:
                resolve(request, from_cache=from_cache)
                return True
            except HubUnavailable as error:
                away = error
    except (UnknownVersion, NoMatchingVariant) as error:
        if isinstance(error, NoMatchingVariant) or not (away or hub.is_offline()):
            return False
    except (UnknownKernel, KernelsLibraryError):
        pass
    if _bundled(request) is not None:
        return True
    if away is not None:
        raise away
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
            return load_remote(request, from_cache=False)
        except UnknownKernel as error:
            return _load_bundled(request, error)
        except HubUnavailable as error:
            away = error
    else:
        away = HubUnavailable(
            f"{request.repo_id}: HF_HUB_OFFLINE=1, so only the cache and the bundled copy were tried."
        )
    try:
        return load_remote(request, from_cache=True)
    except NotTrusted as error:
        # What an earlier version of this package, or a private publish, left in the cache. Ours needs no consent.
        return _load_bundled(request, error, level=logging.WARNING)
    except (UnknownKernel, UnknownVersion) as error:
        return _load_bundled(request, HubUnavailable(f"{away} {error}"))


def _load_bundled(request: Request, reason: PallasHubError, level: int = logging.INFO) -> ModuleType:
    """The copy of the kernel that ships with the package, or `reason` if there is none that fits the request."""
    source = _bundled(request)
    if source is None:
        raise reason
    importer.logger.log(level, "%s: using the bundled copy, because: %s", request.repo_id, reason)
    return load_local(source, request.backend, kind="bundled", trust="bundled with pallas_hub")


def _bundled(request: Request) -> KernelSource | None:
    # A lock or a revision asks for exact bytes from the Hub; the bundled copy must not stand in for them.
    if request.lockfile is not None or request.revision is not None:
        return None
    name = request.repo_id.split("/")[1]
    if name not in request.sources.names():
        return None
    source = read_source(name, request.sources)
    return source if request.version in (None, source.version) and source.repo_id == request.repo_id else None


def _check_version(version: int | None, revision: str | None) -> int | None:
    if version is not None and revision is not None:
        raise UnknownVersion(f"give version or revision, not both; got version={version!r} and revision={revision!r}.")
    if revision is not None:
        check_revision(revision)
    return check_version(version) if version is not None else None


def _require_names(module: ModuleType, names: Iterable[str]) -> None:
    if isinstance(names, str):
        raise LoadError(f"names must be a list of names, as in [{names!r}]; got the string {names!r}.")
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        exported = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        raise LoadError(
            f"{loaded_from(module)}: does not export {', '.join(missing)}; it exports {', '.join(sorted(exported))}."
        )


def _refuse_inside_compile(repo_id: str) -> None:
    import torch

    if torch.compiler.is_compiling():
        raise LoadError(
            f"{repo_id}: get_kernel was called inside a compiled function; load the kernel before compiling."
        )
