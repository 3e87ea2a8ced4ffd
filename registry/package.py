"""The files of a kernel's package, with what it vendors: the bridge, and the packages of other kernels of its shelf.

In the sources these are links, so that there is one copy to edit; every build holds the files themselves:

    _bridge      -> torch_bridge
    _ragged_dot  -> kernels/ragged-dot/torch-ext/ragged_dot, which brings its own _bridge

In an installed copy of the sources the links are folders already, which are taken as they are. Where a kernel has a
tokamax.toml, what its package lacks is made of that.
"""

import re
from pathlib import Path

from pallas_hub.registry.errors import SourceError
from pallas_hub.registry.paths import Sources
from pallas_hub.registry.tokamax_sources import RUNTIME_NAME, read_made_files

BRIDGE = "_bridge"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_IGNORED_SUFFIXES = {".pyc", ".pyo", ".orig", ".rej", ".swp"}


def read_package(name: str, sources: Sources, above: tuple[str, ...] = ()) -> tuple[dict[str, bytes], dict[Path, None]]:
    """Path -> bytes of every file that a build of kernels/<name> holds, and the packages it vendors, in order.

    above   the kernels that vendor this one, outermost first
    """
    package = sources.package(name)
    links = _links(package)
    others = {link: _kernel_behind(package / link, sources) for link in links if link != BRIDGE}
    files = _collect(package, root=sources.folder(name), skip=(BRIDGE, RUNTIME_NAME, *others))
    files |= read_made_files(sources.folder(name), name, files)
    bridge = _bridge_folder(package, files, sources)
    if bridge is not None:
        files |= {f"{BRIDGE}/{path}": data for path, data in _collect(bridge, root=bridge).items()}
    vendored: dict[Path, None] = {}
    for link, other in others.items():
        chain = (*above, name, other)
        if other in chain[:-1]:
            raise SourceError(
                f"{package / link}: a kernel cannot hold a copy of itself: {' -> '.join(chain)}. "
                "Remove one of the links."
            )
        theirs, theirs_vendored = read_package(other, sources, (*above, name))
        files |= {f"{link}/{path}": data for path, data in theirs.items()}
        vendored |= {sources.package(other): None, **theirs_vendored}
    return files, vendored


def _links(package: Path) -> list[str]:
    """Names of the links to folders in a package; they are told from links to files, which _collect judges."""
    below = [path for path in sorted(package.rglob("*")) if path.is_symlink() and path.is_dir()]
    deep = [path for path in below if path.parent != package]
    if deep:
        raise SourceError(
            f"{deep[0]}: a link to a folder may lie at the top of a kernel's package only; move it there."
        )
    return [path.name for path in below]


def _kernel_behind(link: Path, sources: Sources) -> str:
    """The kernel whose package `link` points to."""
    for name in sources.names():
        if link.name.startswith("_") and link.resolve() == sources.package(name).resolve():
            return name
    raise SourceError(
        f"{link} points to {link.resolve()}; a kernel ships only its own files and, by a link called _<name>, the "
        f"package of another kernel of its shelf: {sources.kernels}/<name>/torch-ext/<name>."
    )


def _bridge_folder(package: Path, files: dict[str, bytes], sources: Sources) -> Path | None:
    """The folder to vendor as `_bridge`: a real folder as it is, a link or an import means the shared bridge."""
    link = package / BRIDGE
    if link.is_dir() and not link.is_symlink():
        return link
    wanted = link.is_symlink() or any(b"from ._bridge" in data for path, data in files.items() if "/" not in path)
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
