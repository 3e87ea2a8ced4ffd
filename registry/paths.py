"""Where things are: the package's own kernel sources and manifests, and the user's cache."""

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pallas_hub.registry.errors import SourceError, UnknownVersion

# Not resolved: inside a checkout `pallas_hub/registry` is a symlink, and its siblings are found through it.
PACKAGE_ROOT = Path(__file__).parent.parent

_KERNEL_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
# huggingface_hub's rules, which the Hub shares.
_REPO_PART = re.compile(r"[A-Za-z0-9](?:[\w.-]*\w)?", re.ASCII)
_MAX_REPO_PART = 96


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

    def package(self, name: str) -> Path:
        """Where the Python of kernels/<name> lies."""
        return self.kernels / name / "torch-ext" / name.replace("-", "_")


OUR_SOURCES = Sources()


def cache_root() -> Path:
    """Folder for builds made on this machine; PALLAS_HUB_CACHE moves it."""
    if chosen := os.environ.get("PALLAS_HUB_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    if above := os.environ.get("XDG_CACHE_HOME"):
        return Path(above).absolute() / "pallas-hub"
    try:
        return Path.home() / ".cache" / "pallas-hub"
    except RuntimeError:  # a container whose user has no entry in /etc/passwd and no HOME; what lies there is verified
        return Path(tempfile.gettempdir()) / f"pallas-hub-{os.getuid()}"


def check_repo_id(repo_id: str) -> str:
    """Return `repo_id` if it is `organisation/name`, else say what is wrong with it."""
    hint = ""
    if isinstance(repo_id, str):
        parts = repo_id.split("/")
        plain = len(parts) == 2 and all(_REPO_PART.fullmatch(part) for part in parts)
        if plain and ".." not in repo_id and "--" not in repo_id and not repo_id.endswith(".git"):
            if max(map(len, parts)) <= _MAX_REPO_PART:
                return repo_id
            hint = f" Each of the two has at most {_MAX_REPO_PART} characters."
        elif plain:
            hint = " It must not hold '..' or '--' nor end with '.git'."
        elif _KERNEL_NAME.fullmatch(repo_id) and len(repo_id) <= _MAX_REPO_PART:
            hint = f" Did you mean 'pallas-hub/{repo_id}'?"
    got = repr(repo_id)
    got = got if len(got) < 2 * _MAX_REPO_PART else f"{got[:_MAX_REPO_PART]}..."
    raise SourceError(f"repo id must be 'organisation/name', as in 'pallas-hub/ragged-dot'; got {got}.{hint}")


def check_version(version: int) -> int:
    """Return `version` if a repo can have it, else say what is wrong with it."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**32:
        raise UnknownVersion(f"version must be a whole number such as 1 (branch v1); got {version!r}.")
    return version


def check_revision(revision: str) -> str:
    """Return `revision` if it can name a branch, tag or commit; '..' would become part of a URL and name something."""
    if not isinstance(revision, str) or any(part in ("", ".", "..") for part in revision.split("/")):
        raise UnknownVersion(f"revision must be a branch, tag or commit, as in 'v1'; got {revision!r}.")
    return revision
