"""Lock files: which commit each kernel of a project is loaded from. The format is that of the `kernels` library."""

import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from pallas_hub.registry import hub
from pallas_hub.registry.answers import plain_errors
from pallas_hub.registry.errors import LockError
from pallas_hub.registry.paths import check_repo_id, check_version


def lock(dependencies: dict[str, int], lockfile: Path | str) -> dict[str, str]:
    """Write the commits that `{"org/name": version}` mean now, with all they depend on. Returns repo@v1 -> commit.

    No code is run, so locking asks for no trust; loading a locked kernel does.
    """
    hub.require_kernels()
    from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion

    if not dependencies:
        raise LockError("nothing to lock: name kernels as org/name@version, or list them in pyproject.toml.")
    found: dict[Any, Any] = {}
    api = hub.client()
    waiting = [
        KernelDependency(repo_id=check_repo_id(repo_id), version=KernelVersion.Version(check_version(version)))
        for repo_id, version in dependencies.items()
    ]
    while waiting:
        kernel = waiting.pop()
        if kernel in found:
            continue
        commit, depends = _look_up(api, kernel)
        found[kernel] = KernelLock(commit=commit)
        waiting += depends
    _write(Path(lockfile), KernelLocks(locks=found).to_json())
    return {f"{kernel.repo_id}@{_spec_text(kernel)}": entry.commit for kernel, entry in found.items()}


def read_lock(lockfile: Path) -> Any:
    """The lock file as `kernels._rust.KernelLocks`."""
    from kernels._rust import KernelLocks

    try:
        return KernelLocks.from_json(lockfile.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LockError(
            f"{lockfile} does not exist. Write it: pallas-hub lock org/name@1 --output {lockfile}"
        ) from None
    except OSError as error:
        raise LockError(f"{lockfile} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise LockError(f"{lockfile}: not a lock file of the kernels library ({error}). Write it again.") from error


def project_dependencies(folder: Path) -> dict[str, int]:
    """`[tool.kernels.dependencies]` of a project's pyproject.toml, as `kernels lock` reads it."""
    path = folder / "pyproject.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LockError(f"{path} does not exist; name the kernels instead, as in: pallas-hub lock org/name@1") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LockError(f"{path}: not valid TOML: {error}") from error
    found: Any = data
    for key in ("tool", "kernels", "dependencies"):
        found = found.get(key) if isinstance(found, dict) else None
    if not found or not isinstance(found, dict):
        raise LockError(f'{path}: no [tool.kernels.dependencies] table, as in "pallas-hub/ragged-dot" = 1')
    wrong = {key: value for key, value in found.items() if isinstance(value, bool) or not isinstance(value, int)}
    if wrong:
        raise LockError(f"{path}: versions in [tool.kernels.dependencies] are whole numbers; got {wrong}.")
    return dict(found)


def _look_up(api: Any, kernel: Any) -> tuple[str, list[Any]]:
    """(commit, dependencies over all variants) of one kernel."""
    from kernels._rust import Metadata
    from kernels.hf_hub import CACHE_DIR
    from kernels.variants import get_variants

    version, revision = getattr(kernel.version, "version", None), getattr(kernel.version, "revision", None)
    depends = []
    with plain_errors(kernel.repo_id):
        commit = hub.find_commit(api, kernel.repo_id, version, revision, from_cache=False)
        for variant in get_variants(api, repo_id=kernel.repo_id, revision=commit):
            path = api.hf_hub_download(
                kernel.repo_id,
                repo_type="kernel",
                filename=f"build/{variant.variant_str}/metadata.json",
                cache_dir=CACHE_DIR,
                revision=commit,
            )
            depends += Metadata.read_from_file(path).kernel_depends
    return commit, depends


def _spec_text(kernel: Any) -> str:
    version = getattr(kernel.version, "version", None)
    return f"v{version}" if version is not None else str(getattr(kernel.version, "revision", ""))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise LockError(
            f"{path} cannot be written ({error.strerror}); it is as before. Choose another place with --output."
        ) from error
