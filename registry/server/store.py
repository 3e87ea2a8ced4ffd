"""The store directory: one bare git repository per kernel repo, and one writer at a time per repo.

DIR/pallas-hub-store.json   says that this directory is a store, and in which format
DIR/org/name.git            a bare git repository
DIR/.locks/                 one lock file per repo, held by whoever writes, in any process
DIR/.tmp/                   repositories being made or removed, uploads being received
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Generator
from pathlib import Path

from dulwich.errors import NotGitRepository
from dulwich.file import FileLocked
from dulwich.objects import Commit, ObjectID, Tree
from dulwich.refs import Ref
from dulwich.repo import Repo
from filelock import FileLock, Timeout

from pallas_hub.registry.errors import PallasHubError
from pallas_hub.registry.server.names import check_repo_id
from pallas_hub.registry.server.objects import DRAFT, write_object
from pallas_hub.registry.server.protocol import HubError, repo_not_found

FORMAT = 1
AUTHOR = b"pallas-hub <pallas-hub@localhost>"
DEFAULT_BRANCH = "main"
_MARKER = "pallas-hub-store.json"
_WRITING = "pallas-hub-writing"  # lies in a repo while a writer is at work; found later, it tells that one died
_STALE_AFTER_S = 3600.0
_HARMLESS = {".tmp", ".locks", "lost+found"}  # another server is just making the store, or a fresh disk


class StoreError(PallasHubError):
    """The store directory cannot be used; the message names it and the mend."""


class Store:
    """A store directory. Several servers, also in several processes, may work on the same one."""

    def __init__(self, root: Path, *, lock_timeout_s: float = 60.0) -> None:
        self.root = Path(root).absolute()
        self.lock_timeout_s = lock_timeout_s
        self.tmp = self.root / ".tmp"
        self.sizes: dict[bytes, int] = {}  # blob id -> size; a blob never changes, so this never goes stale
        try:
            self._open()
        except OSError as error:
            raise StoreError(
                f"store {self.root} cannot be used: {error.strerror or error}. Choose a directory that you "
                "may write to with --store DIR."
            ) from error

    def _open(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"store {self.root} is a file, not a directory. Choose another one with --store DIR.")
        self.root.mkdir(parents=True, exist_ok=True)
        marker = self.root / _MARKER
        if marker.exists():
            self._check_format(marker)
        elif {entry.name for entry in self.root.iterdir()} - _HARMLESS:
            raise StoreError(
                f"store {self.root} is neither empty nor a store: it has no {_MARKER}. Choose a new or empty "
                "directory with --store DIR."
            )
        self.tmp.mkdir(exist_ok=True)
        (self.root / ".locks").mkdir(exist_ok=True)
        probe = self.tmp / f"probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
        if not marker.exists():
            draft = self.tmp / f"marker-{uuid.uuid4().hex}"
            draft.write_text(json.dumps({"format": FORMAT}) + "\n")
            draft.replace(marker)
        self._remove_stale()

    def _check_format(self, marker: Path) -> None:
        try:
            found = json.loads(marker.read_text())["format"]
        except (ValueError, KeyError, TypeError):
            raise StoreError(f'store {self.root}: {marker} is damaged; it must hold {{"format": {FORMAT}}}.') from None
        if found != FORMAT:
            raise StoreError(
                f"store {self.root} has format {found}; this version reads format {FORMAT}. Choose another "
                "one with --store DIR."
            )

    def _remove_stale(self) -> None:
        """Remove what killed processes left in .tmp; young entries may belong to another server at work."""
        for entry in self.tmp.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - entry.lstat().st_mtime > _STALE_AFTER_S:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def path(self, repo_id: str) -> Path:
        owner, name = repo_id.split("/")
        return self.root / owner / f"{name}.git"

    def repo_ids(self) -> list[str]:
        found = self.root.glob("[!.]*/*.git")
        return sorted(f"{path.parent.name}/{path.name.removesuffix('.git')}" for path in found)

    @contextlib.contextmanager
    def open(self, repo_id: str) -> Generator[Repo]:
        """The repository for reading; HubError 404 if there is none."""
        owner, _, name = repo_id.partition("/")
        check_repo_id(owner, name)
        path = self.path(repo_id)
        if not path.is_dir():
            raise repo_not_found(repo_id)
        try:
            repo = Repo(str(path), bare=True)
        except NotGitRepository:  # deleted between these lines
            raise repo_not_found(repo_id) from None
        with repo:
            yield repo

    @contextlib.contextmanager
    def open_for_writing(self, repo_id: str) -> Generator[Repo]:
        """The repository with its writer lock held; leftovers of a killed writer are removed first."""
        owner, _, name = repo_id.partition("/")
        check_repo_id(owner, name)
        with self._room_errors(f"{repo_id} is as before"), self._lock(repo_id), self.open(repo_id) as repo:
            writing = Path(repo.path) / _WRITING
            if writing.exists():
                _remove_leftovers(Path(repo.path))
            writing.touch()
            # Not in a `finally`: after an unforeseen error the marker stays, and the next writer cleans up.
            try:
                yield repo
            except HubError:
                writing.unlink()
                raise
            except FileLocked as error:  # by git itself: a push or a gc in the store directory
                writing.unlink()
                raise HubError(
                    503,
                    f"{repo_id}: a git process holds {os.fsdecode(error.lockfilename)}. Try again; if no git process "
                    "is at work there, delete that file.",
                    headers={"Retry-After": "5"},
                ) from None
            writing.unlink()

    @contextlib.contextmanager
    def _lock(self, repo_id: str) -> Generator[None]:
        lock = FileLock(
            self.root / ".locks" / f"{repo_id.replace('/', '--')}.lock",
            timeout=self.lock_timeout_s,
            poll_interval=0.01,
        )
        try:
            lock.acquire()
        except Timeout:
            raise HubError(
                503,
                f"{repo_id} is being written to by somebody else for over {self.lock_timeout_s:g} s. Try again.",
                headers={"Retry-After": "5"},
            ) from None
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _room_errors(self, consequence: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise self.room_error(error, consequence) from error

    def room_error(self, error: OSError, consequence: str) -> Exception:
        """HubError 507 if `error` says that the disk is full or read-only, else `error` itself."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return HubError(
                507,
                f"the store {self.root} has no room left ({error.strerror}); nothing was changed, "
                f"{consequence}. Free some space there, or serve a store on a larger disk.",
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return HubError(
                500,
                f"the store {self.root} cannot be written to ({error.strerror}); nothing was changed, "
                f"{consequence}. Give the server's user write permission there.",
            )
        return error

    def create(self, repo_id: str) -> None:
        """A new repository with one empty commit on main, where branches start. HubError 409 if it exists."""
        draft = self.tmp / f"new-{uuid.uuid4().hex}.git"
        target = self.path(repo_id)
        with self._room_errors(f"{repo_id} was not created"), self._lock(repo_id):
            if target.exists():
                raise HubError(409, f"repository {repo_id} exists already.")
            try:
                _init_repo(draft)
                _move_into_place(draft, target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def delete(self, repo_id: str) -> None:
        """Remove a repository; it disappears at once, its files go later. HubError 404 if there is none."""
        grave = self.tmp / f"gone-{uuid.uuid4().hex}.git"
        with self._room_errors(f"{repo_id} was not deleted"), self._lock(repo_id):
            try:
                os.rename(self.path(repo_id), grave)
            except FileNotFoundError:
                raise repo_not_found(repo_id) from None
            with contextlib.suppress(OSError):
                self.path(repo_id).parent.rmdir()  # the organisation, if this was its last repo
        shutil.rmtree(grave, ignore_errors=True)


def _init_repo(path: Path) -> None:
    with Repo.init_bare(str(path), mkdir=True, default_branch=DEFAULT_BRANCH.encode()) as repo:
        tree = Tree()
        commit = new_commit(tree.id, [], b"initial commit\n")
        write_object(path, tree)
        write_object(path, commit)
        repo.refs.add_if_new(Ref(b"refs/heads/" + DEFAULT_BRANCH.encode()), commit.id)


def _move_into_place(draft: Path, target: Path) -> None:
    for _ in range(10):
        target.parent.mkdir(exist_ok=True)
        # Deleting the organisation's last repo may remove the parent between these two lines.
        with contextlib.suppress(FileNotFoundError):
            os.rename(draft, target)
            return
    raise OSError(f"{target.parent} keeps disappearing")


def new_commit(tree: ObjectID, parents: list[ObjectID], message: bytes) -> Commit:
    commit = Commit()
    commit.tree = tree
    commit.parents = parents
    commit.author = commit.committer = AUTHOR
    commit.author_time = commit.commit_time = int(time.time())
    commit.author_timezone = commit.commit_timezone = 0
    commit.encoding = b"UTF-8"
    commit.message = message
    return commit


def _remove_leftovers(path: Path) -> None:
    """Remove lock files of refs and half-written objects; the caller holds the writer lock, so nobody needs them."""
    for leftover in (
        *path.glob("*.lock"),
        *(path / "refs").rglob("*.lock"),
        *(path / "objects").glob(f"??/{DRAFT}*"),
    ):
        leftover.unlink(missing_ok=True)
