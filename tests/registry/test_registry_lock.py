"""Lock files: the locked commit is loaded, and the kernels library agrees."""

from pathlib import Path

import pytest
import torch
from registry_shelf import Shelf, point_clients_at

from pallas_hub.registry.errors import HubUnavailable, LockError, UnknownKernel, UnknownVersion
from pallas_hub.registry.load import get_kernel, loaded_from
from pallas_hub.registry.lock import lock, project_dependencies

REPO = "pallas-hub/tiny-scale"


@pytest.fixture
def moved(shelf: Shelf, hub_url: str, tmp_path: Path) -> tuple[Shelf, Path, str]:
    """v1 was locked at commit A, then moved on to B, which computes something else."""
    first = shelf.publish(release=True)
    lockfile = tmp_path / "kernels.lock"
    assert lock({REPO: 1}, lockfile) == {f"{REPO}@v1": first.commit}
    shelf.edit("torch-ext/tiny_scale/op.py", "x * factor", "x * factor + 1")
    assert shelf.publish().commit != first.commit
    return shelf, lockfile, first.commit


def test_the_locked_commit_is_loaded_though_the_branch_moved_on(moved):
    shelf, lockfile, commit = moved
    locked = get_kernel(REPO, lockfile=lockfile, sources=shelf.sources)
    assert locked.scale(torch.ones(1)).item() == 2.0
    assert (loaded_from(locked).commit, loaded_from(locked).version, loaded_from(locked).repo_id) == (commit, 1, REPO)
    assert get_kernel(REPO, version=1, sources=shelf.sources).scale(torch.ones(1)).item() == 3.0


def test_the_kernels_library_reads_our_lock(moved):
    import kernels

    shelf, lockfile, _ = moved
    ours = get_kernel(REPO, lockfile=lockfile, sources=shelf.sources)
    assert kernels.get_locked_kernel(REPO, lockfile=lockfile, trust_remote_code=True) is ours
    assert kernels.load_kernel(REPO, lockfile=lockfile) is ours  # offline: only works with the whole snapshot cached


def test_we_read_a_lock_of_the_kernels_library(moved):
    from kernels._rust import KernelDependency, KernelVersion
    from kernels.hf_hub import _get_hf_api
    from kernels.locking import extract_dependency_locks

    _, lockfile, _ = moved
    spec = KernelDependency(repo_id=REPO, version=KernelVersion.Version(1))
    theirs = extract_dependency_locks([spec], api=_get_hf_api()).to_json()
    lock({REPO: 1}, lockfile)
    assert lockfile.read_text() == theirs


def test_a_lock_is_honoured_offline_and_never_replaced_by_the_bundled_copy(moved, tmp_path, monkeypatch):
    shelf, lockfile, commit = moved
    get_kernel(REPO, lockfile=lockfile, sources=shelf.sources)
    point_clients_at("http://127.0.0.1:9", tmp_path / "hf", monkeypatch, offline=True)
    assert loaded_from(get_kernel(REPO, lockfile=lockfile, sources=shelf.sources)).commit == commit
    point_clients_at("http://127.0.0.1:9", tmp_path / "empty", monkeypatch, offline=True)
    with pytest.raises(HubUnavailable, match=rf"HF_HUB_OFFLINE=1.*commit {commit[:12]}\) is not in the cache"):
        get_kernel(REPO, lockfile=lockfile, sources=shelf.sources)


def test_faults_in_lock_files_are_named(shelf: Shelf, hub_url: str, tmp_path: Path):
    path = tmp_path / "kernels.lock"
    with pytest.raises(LockError, match=r"kernels.lock does not exist. Write it: pallas-hub lock"):
        get_kernel(REPO, lockfile=path)
    path.write_text("{")
    with pytest.raises(LockError, match="not a lock file of the kernels library"):
        get_kernel(REPO, lockfile=path)
    shelf.publish()
    lock({REPO: 1}, path)
    with pytest.raises(LockError, match=rf"does not hold pallas-hub/other; it holds {REPO}"):
        get_kernel("pallas-hub/other", lockfile=path)
    with pytest.raises(LockError, match=rf"does not hold {REPO} version 2; it holds {REPO}"):
        get_kernel(REPO, version=2, lockfile=path, sources=shelf.sources)
    with pytest.raises(UnknownKernel, match=r"pallas-hub/other: no kernel repo of that name on"):
        lock({"pallas-hub/other": 1}, path)
    with pytest.raises(LockError, match="nothing to lock"):
        lock({}, path)
    with pytest.raises(UnknownVersion, match="version must be a whole number such as 1"):
        lock({REPO: 2**64}, path)
    with pytest.raises(LockError, match=r"kernels.lock cannot be written \(No such file .*; it is as before"):
        lock({REPO: 1}, tmp_path / "nowhere/kernels.lock")
    with pytest.raises(LockError, match=r"cannot be read \(Is a directory\)"):
        get_kernel(REPO, lockfile=tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "pyproject.toml does not exist; name the kernels instead"),
        ("[", "not valid TOML"),
        ("", r"no \[tool.kernels.dependencies\] table"),
        ("[tool.kernels]\ndependencies = 5", r"no \[tool.kernels.dependencies\] table"),
        ("tool = 5", r"no \[tool.kernels.dependencies\] table"),
        ('[tool.kernels.dependencies]\n"a/b" = "1"', "are whole numbers; got {'a/b': '1'}"),
    ],
)
def test_faults_in_pyproject_are_named(tmp_path: Path, text: str | None, words: str):
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(LockError, match=words):
        project_dependencies(tmp_path)


def test_dependencies_are_read_from_pyproject(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"pallas-hub/rms-norm" = 1\n')
    assert project_dependencies(tmp_path) == {"pallas-hub/rms-norm": 1}
