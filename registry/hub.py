"""The `kernels` library and the Hub it talks to: the client, versions and commits, the local cache.

On a TPU host kernels 0.17 picks torch-cpu, because it looks for torch.backends.tpu, which torch_tpu 0.2 does
not set. That is left as it is: every variant of our kernels holds the same Python and decides by the tensor's
device.
"""

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

from pallas_hub.registry.errors import KernelsLibraryError, LockError, UnknownVersion
from pallas_hub.registry.paths import check_revision

# Internals of the library are used (resolvers, dependency tree), so each minor version is tried before it is allowed.
SUPPORTED_KERNELS = ">=0.17.2,<0.18"

_VERSION = re.compile(r"v(\d+)")
COMMIT = re.compile(r"[0-9a-f]{40}")
SAFE_REF = re.compile(r"[A-Za-z0-9_][\w-]*(\.[\w-]+)*(/[A-Za-z0-9_][\w-]*(\.[\w-]+)*)*")


def require_kernels() -> None:
    """Raise KernelsLibraryError unless the supported `kernels` library is installed."""
    from packaging.specifiers import SpecifierSet

    mend = f'Install it with: pip install "kernels{SUPPORTED_KERNELS}"'
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        raise KernelsLibraryError(
            f"the kernels library is not installed; pallas_hub needs kernels{SUPPORTED_KERNELS} to reach the "
            f"Hub. {mend}"
        ) from None
    if version not in SpecifierSet(SUPPORTED_KERNELS):
        raise KernelsLibraryError(
            f"kernels {version} is installed; pallas_hub works with kernels{SUPPORTED_KERNELS}. {mend}"
        )
    try:
        import kernels.deps
        import kernels.load
        import kernels.resolver  # noqa: F401
    except Exception as error:
        found = getattr(sys.modules.get("kernels"), "__file__", None) or "no file"
        raise KernelsLibraryError(
            f"kernels {version} is installed but cannot be used ({type(error).__name__}: {error}). Python's module "
            f"'kernels' is {found}; no other module may be called so, also not in the folder you started in. If it is "
            f'the library\'s own, install it again: pip install --force-reinstall "kernels{SUPPORTED_KERNELS}"'
        ) from error


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def client(user_agent: str | dict | None = None) -> Any:
    """The kernels library's Hub client.

    With telemetry switched off it asks for the user agent "", which huggingface_hub 2.4 turns into a header that httpx
    refuses to send; None is the same wish in a form that works.
    """
    from kernels.hf_hub import _get_hf_api

    api = _get_hf_api(user_agent=user_agent)
    api.user_agent = api.user_agent or None
    return api


def versions(repo_id: str, *, from_cache: bool) -> dict[int, str]:
    """Version -> commit, from the branches v1, v2, ... of the repo or from the refs in the cache."""
    from kernels._versions import _get_available_versions_from_cache

    if from_cache:
        found = _get_available_versions_from_cache(repo_id)
        return {number: ref.target_commit for number, ref in sorted(found.items())}
    refs = client().list_repo_refs(repo_id, repo_type="kernel")
    numbers = {int(match[1]): branch for branch in refs.branches if (match := _VERSION.fullmatch(branch.name))}
    return {number: branch.target_commit for number, branch in sorted(numbers.items())}


def find_commit(api: Any, repo_id: str, version: int | None, revision: str | None, *, from_cache: bool) -> str:
    """The commit that a version or revision names now."""
    if revision is not None:
        return _commit_of_revision(api, repo_id, check_revision(revision), from_cache)
    known = versions(repo_id, from_cache=from_cache)
    if version in known:
        return known[version]
    listed = ", ".join(f"v{number}" for number in known) or "none"
    if not from_cache:
        raise UnknownVersion(f"{repo_id} has no version {version}; versions on {endpoint()}: {listed}.")
    raise UnknownVersion(
        f"{repo_id} version {version} is not in the cache {cache_folder(repo_id)}; versions there: {listed}. "
        f"While online, run: pallas-hub download {repo_id} --version {version}"
    )


def locked_commit(locks: Any, kernel: Any) -> str:
    lock = locks.get(kernel)
    if lock is None:
        held = ", ".join(sorted(dependency.repo_id for dependency in locks)) or "nothing"
        raise LockError(f"{kernel.repo_id}: not in the lock file, which holds {held}. Lock it again: pallas-hub lock")
    return lock.commit


def cache_folder(repo_id: str) -> Path:
    """The repo's folder in the Hub cache that the kernels library uses."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from kernels.hf_hub import CACHE_DIR

    return Path(CACHE_DIR or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="kernel")


def _commit_of_revision(api: Any, repo_id: str, revision: str, from_cache: bool) -> str:
    from huggingface_hub.errors import RevisionNotFoundError

    if from_cache:
        folder = cache_folder(repo_id)
        if COMMIT.fullmatch(revision) and (folder / "snapshots" / revision).is_dir():
            return revision
        ref = folder / "refs" / revision
        if SAFE_REF.fullmatch(revision) and ref.is_file():
            return ref.read_text().strip()
        raise UnknownVersion(
            f"{repo_id} revision {revision!r} is not in the cache {folder}. "
            f"While online, run: pallas-hub download {repo_id} --revision {revision}"
        )
    if COMMIT.fullmatch(revision):
        return revision
    try:
        return api.repo_info(repo_id, repo_type="kernel", revision=revision).sha
    except RevisionNotFoundError as error:
        listed = ", ".join(f"v{number}" for number in versions(repo_id, from_cache=False)) or "none"
        raise UnknownVersion(f"{repo_id} has no revision {revision!r}; versions: {listed}.") from error
