"""Kernels built on this machine: from a source folder, or the copy that ships with the package.

A build is kept in the user's cache under a name made from the content of its sources, so it never goes stale, and is
checked against those sources on each load. A cache that cannot be written (a read-only home, a container) is replaced
by a temporary folder.
"""

import atexit
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from types import ModuleType

from pallas_hub.registry import importer
from pallas_hub.registry.build import check, kernel_id, swap, variant_metadata, write_tree
from pallas_hub.registry.digests import hash_files, tree_digest, verify_variant
from pallas_hub.registry.errors import DigestMismatch, LoadError, NoMatchingVariant
from pallas_hub.registry.importer import LoadedFrom
from pallas_hub.registry.paths import OUR_SOURCES, Sources, cache_root
from pallas_hub.registry.source import KernelSource, read_source

# Ends the id of local builds: the same kernel from the Hub can then live in the same process, with its own torch ops.
_LOCAL = "_local"

_temporary_folders: dict[str, Path] = {}


def load_source(name: str, *, backend: str | None = None, sources: Sources = OUR_SOURCES) -> ModuleType:
    """Build kernels/<name> as it is now, if needed, and load it. No Hub, no trust question: it is your own source tree.

    Raises   SourceError: no such kernel.  BuildRefused: the sources break a rule.
    """
    return load_local(read_source(name, sources), backend, kind="source", trust="your own source tree")


def load_local(source: KernelSource, backend: str | None, *, kind: str, trust: str) -> ModuleType:
    """Load the local build of `source`; `kind` and `trust` go into the record of where it came from."""
    backend = choose_backend(source, backend)
    variant = f"torch-{backend}"
    hashes = hash_files(source.files)
    digest = tree_digest(hashes)
    module_id = kernel_id(source.name, source.version, backend, digest) + _LOCAL
    with importer.load_lock:
        module = sys.modules.get(module_id)
        if module is not None:
            return module
        folder = ensure_built(source) / "build" / variant
        importer.register_verified(module_id, folder, hashes)
        module = importer.import_verified(module_id)
        origin = LoadedFrom(
            source.name,
            source.repo_id,
            source.version,
            None,
            kind,
            variant,
            trust,
            path=folder,
            digest=digest,
        )
        importer.record(module_id, origin)
        return module


def ensure_built(source: KernelSource) -> Path:
    """Folder of the local build, holding `build/<variant>/`; built now unless it is there and intact."""
    place = _place(source)
    if not _intact(source, place):
        check(source)
        place = _write(source, place)
    return place


def choose_backend(source: KernelSource, backend: str | None) -> str:
    """The variant for this machine. All variants hold the same Python and decide by the tensor's device when called,
    so this only has to name one that exists; a TPU host gets torch-cpu, as from the kernels library."""
    import torch

    wanted = backend or ("cuda" if torch.version.cuda is not None else "cpu")
    if wanted not in source.backends and backend is None and "cpu" in source.backends:
        wanted = "cpu"
    if wanted not in source.backends:
        raise NoMatchingVariant(
            f"{source.name} v{source.version} has no build for backend {wanted!r}; it has: "
            f"{', '.join(source.variants)}. Leave `backend` out to use the one for this machine."
        )
    return wanted


def _place(source: KernelSource) -> Path:
    key = f"{source.name}-v{source.version}-{source.fingerprint[:20]}"
    return _temporary_folders.get(key) or cache_root() / "builds" / key


def _intact(source: KernelSource, place: Path) -> bool:
    hashes = hash_files(source.files)
    try:
        for variant, backend in source.variants.items():
            folder = place / "build" / variant
            if (folder / "metadata.json").read_bytes() != variant_metadata(source, backend, mark=_LOCAL)[0]:
                return False
            verify_variant(folder, hashes, mend="It is built again.")
    except (OSError, DigestMismatch):
        return False
    return True


def _write(source: KernelSource, place: Path) -> Path:
    files = {}
    for variant, backend in source.variants.items():
        metadata, _ = variant_metadata(source, backend, mark=_LOCAL)
        for path, data in {**source.files, "metadata.json": metadata}.items():
            files[f"build/{variant}/{path}"] = data
    try:
        _put(source, files, place)
    except OSError:
        return _put_aside(files, place)
    return place


def _put_aside(files: dict[str, bytes], place: Path) -> Path:
    """Write the build to a temporary folder, kept until the process ends."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="pallas-hub-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        write_tree(files, folder / place.name)
    except OSError as error:
        raise LoadError(
            f"{place.name}: its build can be written neither to {place.parent} nor to a temporary folder "
            f"({error.strerror}). Make room, or set PALLAS_HUB_CACHE or TMPDIR to another folder."
        ) from error
    _temporary_folders[place.name] = folder / place.name
    return folder / place.name


def _put(source: KernelSource, files: dict[str, bytes], place: Path) -> None:
    """Make `place` hold `files`, without moving an intact build away from under a process that imports from it."""
    fresh = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        write_tree(files, fresh)
        try:
            os.rename(fresh, place)
        except OSError:
            if not _intact(source, place):  # it is there and damaged; else another process was faster
                swap(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
