"""Turn a kernel's sources into the files of its Hub repo: build variants, card, licence, benchmarks.

The same sources give the same bytes, whatever the time, folder, umask or locale. A build appears whole or not at all:
it is made in a temporary folder next to its place and renamed.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pallas_hub.registry.api import Api, read_api
from pallas_hub.registry.card import fill_card
from pallas_hub.registry.digests import hash_files, tree_digest
from pallas_hub.registry.errors import BuildRefused, SourceError
from pallas_hub.registry.paths import OUR_SOURCES, Sources
from pallas_hub.registry.provenance import provenance
from pallas_hub.registry.source import KernelSource, read_source
from pallas_hub.registry.static_check import check_sources

# The first release whose loader knows the noarch variants, the digests and the provenance that we write.
KERNELS_MINVER = "0.17.0"

# All that a repo folder holds.
_TOP_LEVEL = ("LICENSE", "README.md", "benchmarks", "build")

_LICENSES = Path(__file__).parent / "licenses"


@dataclass(frozen=True)
class Built:
    """What `build` made: the repo folder, the API and one tree digest per variant."""

    name: str
    version: int
    repo_id: str
    path: Path
    api: Api
    digests: dict[str, str]


def build(name: str, out: Path | str | None = None, *, sources: Sources = OUR_SOURCES) -> Built:
    """Build kernels/<name> into `out` (default: dist/<name>), replacing an earlier build there.

    Raises   SourceError: no such kernel, or a malformed build.toml.  BuildRefused: the sources break a rule.
    """
    source = read_source(name, sources)
    place = Path(out) if out is not None else Path("dist") / name
    _refuse_foreign_folder(place)
    files, api, digests = repo_files(source)
    write_tree(files, place.resolve())  # a link keeps its name, what it points to is replaced
    return Built(source.name, source.version, source.repo_id, place, api, digests)


def check(source: KernelSource) -> Api:
    """Check every rule for the sources of a kernel and return its public API."""
    return read_api(source.name, check_sources(source.name, source.files))


def repo_files(source: KernelSource) -> tuple[dict[str, bytes], Api, dict[str, str]]:
    """Every file of the kernel's repo, in memory; with the API and the tree digest of each variant."""
    api = check(source)
    files: dict[str, bytes] = {}
    digests = {}
    origin = provenance(source)
    for variant, backend in source.variants.items():
        metadata, digests[variant] = variant_metadata(source, backend, origin=origin)
        for path, data in {**source.files, "metadata.json": metadata}.items():
            files[f"build/{variant}/{path}"] = data
    files["README.md"] = fill_card(source, api, digests).encode()
    files["LICENSE"] = _license_text(source)
    for path in sorted((source.folder / "benchmarks").glob("*.py")):
        files[f"benchmarks/{path.name}"] = path.read_bytes()
    return files, api, digests


def variant_metadata(
    source: KernelSource, backend: str, *, origin: dict | None = None, mark: str = ""
) -> tuple[bytes, str]:
    """metadata.json of one variant, and its tree digest. `mark` ends the id of builds that stay on this machine."""
    hashes = hash_files(source.files)
    digest = tree_digest(hashes)
    metadata = {
        "name": source.name,
        "id": kernel_id(source.name, source.version, backend, digest) + mark,
        "version": source.version,
        "license": source.license,
        **({"upstream": source.upstream} if source.upstream else {}),
        **({"source": source.source_url} if source.source_url else {}),
        "python-depends": [],
        "kernel-depends": [],
        "kernels-minver": KERNELS_MINVER,
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": hashes},
        **({"provenance": origin} if origin else {}),
    }
    return (json.dumps(metadata, indent=2) + "\n").encode(), digest


def kernel_id(name: str, version: int, backend: str, digest: str) -> str:
    """Name of the module and of its torch.ops namespace: differs per kernel, version, backend and content."""
    return f"_{name.replace('-', '_')}_v{version}_{backend}_{digest.removeprefix('sha256:')[:12]}"


def write_tree(files: dict[str, bytes], place: Path) -> None:
    """Write `files` to a folder next to `place` and rename it there, replacing what was."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        for path, data in files.items():
            target = temporary / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        for path in (temporary, *temporary.rglob("*")):  # not the umask's choice
            os.chmod(path, 0o755 if path.is_dir() else 0o644)
        swap(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def swap(temporary: Path, place: Path) -> None:
    """Rename `temporary` to `place`, removing the folder that was there."""
    if place.is_dir() and not place.is_symlink():
        old = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.old."))
        os.rename(place, old / "tree")
        os.rename(temporary, place)
        shutil.rmtree(old)
    else:
        os.rename(temporary, place)


def _refuse_foreign_folder(place: Path) -> None:
    """A wrong --out must not delete somebody's folder: only an empty one or an earlier build is replaced."""
    if place.exists() and not place.is_dir():
        raise SourceError(f"{place} is a file; choose a folder for the build.")
    if not place.is_dir() or not any(place.iterdir()):
        return
    variants = [*(place / "build").iterdir()] if (place / "build").is_dir() else []
    foreign = sorted(path.name for path in place.iterdir() if path.name not in _TOP_LEVEL)
    foreign += [f"build/{path.name}" for path in variants if not (path / "metadata.json").is_file()]
    if not variants or foreign:
        found = f"it holds {', '.join(foreign[:3])}" if foreign else "no build/ in it"
        raise SourceError(f"{place} is not empty and not an earlier build ({found}); choose another folder.")


def _license_text(source: KernelSource) -> bytes:
    own = source.folder / "LICENSE"
    packaged = _LICENSES / f"{source.license}.txt"
    for path in (own, packaged):
        if path.is_file():
            return path.read_bytes()
    raise BuildRefused(f"{source.name}: license is {source.license!r} and {own} does not exist; put its text there.")
