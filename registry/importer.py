"""Import verified kernels, and remember where each came from.

Verification and import are one step: the modules of a verified kernel are compiled from source bytes whose hash was
just compared, also those that are imported later, on first use. Bytecode caches are never read, since no digest covers
them.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pallas_hub.registry.digests import encode
from pallas_hub.registry.errors import DigestMismatch, LoadError

logger = logging.getLogger("pallas_hub.registry")

# One load at a time: two threads running the same kernel's code would register its torch ops twice.
load_lock = threading.RLock()


def _renew_lock() -> None:
    global load_lock
    load_lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # a child must not inherit a lock that another thread of its parent held
    os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class LoadedFrom:
    """Where a loaded kernel came from and why its code was allowed to run."""

    name: str
    repo_id: str
    version: int | None
    commit: str | None  # None: built on this machine
    source: str  # "hub", "cache", "bundled", "source" or "local"
    variant: str
    trust: str
    path: Path
    digest: str | None  # tree digest of the files, None if the repo promises none

    def __str__(self) -> str:
        commit = f", commit {self.commit[:12]}" if self.commit else ""
        where = f"{self.repo_id} v{self.version} ({self.variant}{commit})"
        return f"{where} loaded from {self.source}: {self.trust} [{self.path}]"


@dataclass(frozen=True)
class _Package:
    folder: Path
    hashes: dict[str, str]
    algorithm: str


_verified: dict[str, _Package] = {}
_origins: dict[str, LoadedFrom] = {}


def loaded_from(thing: object) -> LoadedFrom:
    """Where a kernel module, or a function, class or op of one, was loaded from.

    Raises   LoadError: `thing` does not belong to a kernel that pallas_hub loaded.
    """
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    origin = _origins.get(str(name).split(".")[0])
    if origin is None:
        raise LoadError(f"{name}: not a kernel loaded by pallas_hub. Loaded: {', '.join(sorted(_origins)) or 'none'}.")
    return origin


def already_loaded(module_id: str, digest: str | None, path: Path) -> ModuleType | None:
    """The loaded module of that id with the same files; LoadError if the id is taken by something else."""
    module = sys.modules.get(module_id)
    if module is None:
        return None
    origin = _origins.get(module_id)
    if origin is not None and (origin.path == path or (digest is not None and origin.digest == digest)):
        return module
    if origin is None and getattr(module, "__file__", None) and Path(module.__file__).is_relative_to(path):
        return module  # the kernels library loaded it before us, from this very folder
    raise LoadError(
        f"{path}: its metadata.json claims the module name {module_id!r}, which is taken by "
        f"{origin or getattr(module, '__file__', module)}. Load the two in separate processes."
    )


def register_verified(
    module_id: str, folder: Path, hashes: dict[str, str], *, algorithm: str = "sha256", inside: str = ""
) -> None:
    """From now on, import `module_id` and its submodules from exactly these files.

    inside   the package's own folder below `folder`, "" or "name/"
    """
    own = {path.removeprefix(inside): value for path, value in hashes.items() if path.startswith(inside)}
    if "__init__.py" not in own:
        raise LoadError(f"{folder}: holds no {inside}__init__.py; it is not a kernel.")
    _verified[module_id] = _Package(folder / inside, own, algorithm)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def forget(module_id: str) -> None:
    """Undo `register_verified` and a half-done import, so that a retry starts from scratch."""
    _verified.pop(module_id, None)
    for name in [name for name in sys.modules if name == module_id or name.startswith(f"{module_id}.")]:
        del sys.modules[name]


def import_verified(module_id: str) -> ModuleType:
    """Import a registered package. On failure nothing of it stays in sys.modules."""
    spec = _spec(module_id, "")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_id] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        forget(module_id)
        raise
    return module


def record(module_id: str, origin: LoadedFrom) -> None:
    """Remember and log where a module came from; the first load is what counts."""
    if _origins.setdefault(module_id, origin) is origin:
        logger.info("%s", origin)


class _VerifiedLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module from bytes that have the promised hash, and from nothing else."""

    def __init__(self, fullname: str, path: str, wanted: str, algorithm: str):
        super().__init__(fullname, path)
        self._wanted, self._algorithm = wanted, algorithm

    def get_code(self, fullname: str):
        path = self.get_filename(fullname)
        data = self.get_data(path)
        got = encode(data, self._algorithm)
        if got != self._wanted:
            raise DigestMismatch(
                f"{path}: refused before running it: wanted {self._wanted}, got {got}. The file changed "
                "after the kernel was loaded; restart the program to fetch or verify the kernel again."
            )
        return self.source_to_code(data, path)


class _VerifiedFinder(importlib.abc.MetaPathFinder):
    """Finds submodules of verified kernels among their listed files only."""

    def find_spec(self, fullname: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if not rest or root not in _verified:
            return None
        return _spec(fullname, rest.replace(".", "/"))


_FINDER = _VerifiedFinder()


def _spec(fullname: str, inside: str) -> importlib.machinery.ModuleSpec | None:
    package = _verified[fullname.split(".")[0]]
    for relative, is_package in ((f"{inside}/__init__.py".lstrip("/"), True), (f"{inside}.py", False)):
        if relative in package.hashes:
            path = package.folder / relative
            loader = _VerifiedLoader(fullname, str(path), package.hashes[relative], package.algorithm)
            folders = [str(path.parent)] if is_package else None
            return importlib.util.spec_from_file_location(
                fullname, path, loader=loader, submodule_search_locations=folders
            )
    if _native_files(package, inside):
        return None  # a compiled extension, verified as a file: the ordinary finders load it
    raise ModuleNotFoundError(
        f"No module named {fullname!r} among the verified files of {package.folder}", name=fullname
    )


def _native_files(package: _Package, inside: str) -> bool:
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return any(path.startswith(f"{inside}.") and path.endswith(suffixes) for path in package.hashes)
