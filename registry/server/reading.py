"""What a client may ask about one repo: revisions, refs, files, folders, history.

No lock is needed: a revision becomes a commit once per request, and objects never change.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dulwich.errors import NotTreeError
from dulwich.object_store import iter_tree_contents, tree_lookup_path
from dulwich.objects import Blob, Commit, ObjectID, Tag, Tree
from dulwich.refs import Ref
from dulwich.repo import Repo

from pallas_hub.registry.server.names import is_sha
from pallas_hub.registry.server.protocol import entry_not_found, iso_time, revision_not_found

_BRANCHES = b"refs/heads/"
_TAGS = b"refs/tags/"


@dataclass(frozen=True)
class Snapshot:
    """One commit of one repo, as a request sees it from its first to its last line."""

    repo_id: str
    repo: Repo
    commit: Commit
    sizes: dict[bytes, int]  # the store's, shared by all requests

    @property
    def sha(self) -> str:
        return self.commit.id.decode()

    def blob(self, path: str) -> ObjectID:
        """The blob id of a file; HubError 404 if the path is no file at this commit."""
        mode, sha = self._lookup(path)
        if not stat.S_ISREG(mode):
            raise entry_not_found(self.repo_id, path, self.sha)
        return sha

    def content(self, blob: ObjectID) -> bytes:
        return self.repo.object_store[blob].as_raw_string()

    def size(self, blob: ObjectID) -> int:
        size = self.sizes.get(blob)
        if size is None:
            size = self.sizes[blob] = len(self.content(blob))
        return size

    def files(self) -> dict[bytes, tuple[int, ObjectID]]:
        """path -> (mode, blob id) of every file."""
        entries = iter_tree_contents(self.repo.object_store, self.commit.tree)
        return {entry.path: (entry.mode, entry.sha) for entry in entries}

    def tree(self, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
        """Entries of a folder as the tree endpoint lists them; HubError 404 if it is no folder."""
        root = self.commit.tree
        if folder:
            mode, root = self._lookup(folder)
            if not stat.S_ISDIR(mode):
                raise entry_not_found(self.repo_id, folder, self.sha)
        return list(self._walk(root, folder, recursive))

    def _walk(self, tree_id: ObjectID, folder: str, recursive: bool) -> Iterator[dict[str, Any]]:
        tree = self.repo.object_store[tree_id]
        assert isinstance(tree, Tree)
        for name, mode, sha in tree.items():
            path = f"{folder}/{name.decode()}" if folder else name.decode()
            entry = self._entry(path, mode, sha)
            if entry is not None:
                yield entry
            if recursive and stat.S_ISDIR(mode):
                yield from self._walk(sha, path, recursive)

    def entry(self, path: str) -> dict[str, Any] | None:
        """The tree entry of one path, or None if there is nothing."""
        found = self._find(path)
        return None if found is None else self._entry(path, *found)

    def _entry(self, path: str, mode: int, sha: ObjectID) -> dict[str, Any] | None:
        if stat.S_ISDIR(mode):
            return {"type": "directory", "path": path, "oid": sha.decode(), "size": 0}
        if stat.S_ISREG(mode):
            return {"type": "file", "path": path, "oid": sha.decode(), "size": self.size(sha)}
        return None  # a link or a submodule: cannot be uploaded, so it is not served either

    def _lookup(self, path: str) -> tuple[int, ObjectID]:
        found = self._find(path)
        if found is None:
            raise entry_not_found(self.repo_id, path, self.sha)
        return found

    def _find(self, path: str) -> tuple[int, ObjectID] | None:
        try:
            return tree_lookup_path(self.repo.object_store.__getitem__, self.commit.tree, path.encode())
        except (KeyError, ValueError, NotTreeError):  # not there; no valid path; below a file
            return None

    def info(self, *, with_blobs: bool) -> dict[str, Any]:
        """The repo at this commit, as repo_info wants it."""
        files = self.files()
        siblings: list[dict[str, Any]] = [{"rfilename": path.decode()} for path in files]
        if with_blobs:
            for sibling, (_, sha) in zip(siblings, files.values(), strict=True):
                sibling.update(blobId=sha.decode(), size=self.size(sha))
        return {
            "id": self.repo_id,
            "author": self.repo_id.split("/")[0],
            "sha": self.sha,
            "lastModified": iso_time(self.commit.commit_time),
            "private": False,
            "gated": False,
            "disabled": False,
            "likes": 0,
            "downloads": 0,
            "tags": [],
            "siblings": siblings,
        }

    def history(self) -> list[dict[str, Any]]:
        """Commits from this one back to the first."""
        return [_describe(entry.commit) for entry in self.repo.get_walker(include=[self.commit.id])]


def _describe(commit: Commit) -> dict[str, Any]:
    title, _, message = commit.message.decode("utf-8", "replace").strip().partition("\n")
    author = commit.author.decode("utf-8", "replace").split(" <")[0]
    return {
        "id": commit.id.decode(),
        "title": title,
        "message": message.strip(),
        "date": iso_time(commit.commit_time),
        "authors": [{"user": author}],
    }


def snapshot(repo: Repo, repo_id: str, revision: str, sizes: dict[bytes, int]) -> Snapshot:
    """The commit `revision` names now: a full commit id, `refs/...`, a branch or a tag; else HubError 404."""
    commit = None
    if is_sha(revision):
        commit = _commit(repo, ObjectID(revision.encode()))
    else:
        name = revision.encode("utf-8", "replace")
        candidates = [name] if name.startswith((_BRANCHES, _TAGS)) else [_BRANCHES + name, _TAGS + name]
        targets = [read_ref(repo, candidate) for candidate in candidates]
        commit = next((_commit(repo, target) for target in targets if target is not None), None)
    if commit is None:
        raise revision_not_found(repo_id, revision)
    return Snapshot(repo_id, repo, commit, sizes)


def read_ref(repo: Repo, ref: bytes) -> ObjectID | None:
    """What a full ref name points to, or None; also None for a name that can be no ref."""
    try:
        return repo.refs[Ref(ref)]
    except (KeyError, ValueError, OSError):
        return None


def _commit(repo: Repo, sha: ObjectID) -> Commit | None:
    try:
        found = repo.object_store[sha]
        while isinstance(found, Tag):
            found = repo.object_store[found.object[1]]
    except KeyError:
        return None
    return found if isinstance(found, Commit) else None


def list_refs(repo: Repo) -> dict[str, list[dict[str, str]]]:
    """Branches and tags with the commits they lead to."""
    listed: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
    for key, prefix in (("branches", _BRANCHES), ("tags", _TAGS)):
        for name in sorted(repo.refs.subkeys(Ref(prefix))):
            target = read_ref(repo, prefix + name)
            commit = _commit(repo, target) if target is not None else None
            if commit is not None:
                ref = {
                    "name": name.decode(),
                    "ref": (prefix + name).decode(),
                    "targetCommit": commit.id.decode(),
                }
                listed[key].append(ref)
    return listed


def read_text(snap: Snapshot, path: str) -> str | None:
    """A small text file of the snapshot, or None."""
    entry = snap.entry(path)
    if entry is None or entry["type"] != "file":
        return None
    blob = snap.repo.object_store[ObjectID(entry["oid"].encode())]
    assert isinstance(blob, Blob)
    return blob.data.decode("utf-8", "replace")
