"""Read a kernel's source folder: its build.toml and the files that every build variant will hold."""

import hashlib
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pallas_hub.registry.errors import SourceError
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id

# Raised when the bytes of a build change for the same sources, so that caches of older builds are not reused.
BUILDER_FORMAT = "pallas-hub-1"

BACKENDS = ("cpu", "cuda", "tpu")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_IGNORED_SUFFIXES = {".pyc", ".pyo", ".orig", ".rej", ".swp"}


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
    """Read kernels/<name>; `_bridge` is replaced by the bridge's own files."""
    folder = sources.folder(name)
    general = _read_general(folder / "build.toml", name)
    python_name = name.replace("-", "_")
    package = folder / "torch-ext" / python_name
    if not (package / "__init__.py").is_file():
        raise SourceError(f"{name}: {package / '__init__.py'} does not exist; it holds the kernel's public API.")
    files = _collect(package, root=folder, skip=("_bridge",))
    bridge = _bridge_folder(package, files, sources)
    if bridge is not None:
        for path, data in _collect(bridge, root=bridge.resolve()).items():
            files[f"_bridge/{path}"] = data
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


def _bridge_folder(package: Path, files: dict[str, bytes], sources: Sources) -> Path | None:
    """The folder to vendor as `_bridge`: a real folder as it is, a link or an import means the shared bridge."""
    link = package / "_bridge"
    if link.is_dir() and not link.is_symlink():
        return link
    wanted = link.is_symlink() or any(b"from ._bridge" in data for data in files.values())
    if not wanted:
        return None
    if not (sources.bridge / "__init__.py").is_file():
        raise SourceError(f"{package}: uses ._bridge, but {sources.bridge} holds no __init__.py.")
    return sources.bridge


def _collect(folder: Path, *, root: Path, skip: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Bytes of the files below `folder`, without hidden files, bytecode and editors' backups."""
    files = {}
    root = root.resolve()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if parts[0] in skip or "__pycache__" in parts or any(part.startswith(".") for part in parts):
            continue
        if path.suffix in _IGNORED_SUFFIXES or path.name.endswith("~") or path.is_dir():
            continue
        if not path.resolve().is_relative_to(root):
            raise SourceError(f"{path} points outside {root}; a kernel ships only its own files.")
        if not path.is_file():
            raise SourceError(f"{path} is not a plain file (a link to nothing, a pipe); remove it.")
        if not all(_FILE_NAME.fullmatch(part) for part in parts):
            raise SourceError(f"{path}: file names in a kernel are letters, digits, '.', '_' and '-'.")
        files["/".join(parts)] = path.read_bytes()
    return files
