"""Read a kernel's source folder: its build.toml and the files that every build variant will hold."""

import hashlib
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pallas_hub.registry.errors import SourceError
from pallas_hub.registry.package import read_package
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id

# Raised when the bytes of a build change for the same sources, so that caches of older builds are not reused.
BUILDER_FORMAT = "pallas-hub-1"

BACKENDS = ("cpu", "cuda", "tpu")


@dataclass(frozen=True)
class KernelSource:
    """One kernel, read into memory. `files` maps the path inside a variant to its bytes."""

    name: str
    version: int
    license: str
    repo_id: str
    backends: tuple[str, ...]
    upstream: str | None
    source_url: str | None
    folder: Path
    bridge: Path
    files: dict[str, bytes]
    vendored: tuple[Path, ...] = ()  # packages of other kernels that this one holds a copy of

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variants(self) -> dict[str, str]:
        """Variant folder name -> backend."""
        return {f"torch-{backend}": backend for backend in self.backends}

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over everything that decides the bytes of a variant."""
        total = hashlib.sha256()
        head = (BUILDER_FORMAT, self.name, str(self.version), self.license, *self.backends)
        for text in (*head, self.upstream or "", self.source_url or ""):
            total.update(text.encode() + b"\0")
        for path, data in sorted(self.files.items()):
            total.update(f"{path}\0{len(data)}\0".encode() + data)
        return total.hexdigest()


def read_source(name: str, sources: Sources = OUR_SOURCES) -> KernelSource:
    """Read kernels/<name>; links to the bridge and to other kernels are replaced by the files they point to."""
    folder = sources.folder(name)
    general = _read_general(folder / "build.toml", name)
    files, vendored = read_package(name, sources)
    if "__init__.py" not in files:
        init = sources.package(name) / "__init__.py"
        raise SourceError(f"{name}: {init} does not exist; it holds the kernel's public API.")
    return KernelSource(
        name=name,
        version=general["version"],
        license=general["license"],
        repo_id=check_repo_id(general["hub"]["repo-id"]),
        backends=tuple(sorted(general["backends"])),
        upstream=general.get("upstream"),
        source_url=general.get("source"),
        folder=folder,
        bridge=sources.bridge,
        files=files,
        vendored=tuple(vendored),
    )


def _read_general(path: Path, name: str) -> dict:
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: not valid TOML: {error}") from error
    general = config.get("general")
    if not isinstance(general, dict):
        raise SourceError(f"{path}: no [general] table; it holds name, version, license and backends.")
    if "torch-noarch" not in config:
        raise SourceError(f"{path}: no [torch-noarch] table; kernels here are plain Python for every machine.")
    _check_general(general, path, name)
    return general


def _check_general(general: dict, path: Path, name: str) -> None:
    wanted = {"name": str, "version": int, "license": str, "backends": list}
    for key, kind in wanted.items():
        if not isinstance(general.get(key), kind) or isinstance(general.get(key), bool):
            raise SourceError(f"{path}: general.{key} must be {kind.__name__}; got {general.get(key)!r}.")
    if general["name"] != name:
        raise SourceError(f"{path}: general.name is {general['name']!r} but the folder is called {name!r}.")
    if general["version"] < 1:
        raise SourceError(f"{path}: general.version counts from 1; got {general['version']}.")
    if not general["backends"] or any(backend not in BACKENDS for backend in general["backends"]):
        raise SourceError(f"{path}: general.backends must be some of {', '.join(BACKENDS)}; got {general['backends']}.")
    hub = general.get("hub")
    if not isinstance(hub, dict) or not isinstance(hub.get("repo-id"), str):
        raise SourceError(f'{path}: [general.hub] must hold repo-id, as in repo-id = "pallas-hub/{name}".')
    for key in ("python-depends", "kernel-depends"):
        if general.get(key):
            raise SourceError(
                f"{path}: general.{key} = {general[key]} is not supported: the kernels library refuses "
                "packages it does "
                "not list (jax among them), so a kernel imports what it needs on first use and says so when "
                "it is missing."
            )
