"""Where things are: the package's own kernel sources and manifests, and the user's cache."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pallas_hub.registry.errors import SourceError

# Not resolved: inside a checkout `pallas_hub/registry` is a symlink, and its siblings are found through it.
PACKAGE_ROOT = Path(__file__).parent.parent

_KERNEL_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Sources:
    """A shelf of kernel sources with the manifests that describe them."""

    kernels: Path = PACKAGE_ROOT / "kernels"
    manifests: Path = PACKAGE_ROOT / "hub_manifests"
    bridge: Path = PACKAGE_ROOT / "torch_bridge"

    def names(self) -> list[str]:
        """Names of the kernels that have a build.toml here."""
        return sorted(path.parent.name for path in self.kernels.glob("*/build.toml"))

    def folder(self, name: str) -> Path:
        if not _KERNEL_NAME.fullmatch(name):
            raise SourceError(
                f"{name!r} is not a kernel name: lower-case letters, digits and '-', as in 'ragged-dot'. "
                f"Kernels here: {', '.join(self.names()) or 'none'}."
            )
        folder = self.kernels / name
        if not (folder / "build.toml").is_file():
            raise SourceError(
                f"no kernel {name!r} in {self.kernels}: {folder / 'build.toml'} does not exist. "
                f"Kernels here: {', '.join(self.names()) or 'none'}."
            )
        return folder


OUR_SOURCES = Sources()


def cache_root() -> Path:
    """Folder for builds made on this machine; PALLAS_HUB_CACHE moves it."""
    if chosen := os.environ.get("PALLAS_HUB_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pallas-hub"


def check_repo_id(repo_id: str) -> str:
    """Return `repo_id` if it is `organisation/name`, else say what is wrong with it."""
    if isinstance(repo_id, str) and _REPO_ID.fullmatch(repo_id) and ".." not in repo_id:
        return repo_id
    hint = ""
    if isinstance(repo_id, str) and _KERNEL_NAME.fullmatch(repo_id):
        hint = f" Did you mean 'pallas-hub/{repo_id}'?"
    raise SourceError(f"repo id must be 'organisation/name', as in 'pallas-hub/ragged-dot'; got {repo_id!r}.{hint}")
