"""Changes to one repo. The caller holds the writer lock (`Store.open_for_writing`).

Every change writes its objects first and then moves one ref, by compare-and-swap on the value it started
from. A process that dies before that leaves the branch at the old commit and, at worst, objects that nothing
points to.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from dulwich.index import commit_tree
from dulwich.object_store import MemoryObjectStore
from dulwich.objects import Commit, ObjectID, Tag
from dulwich.refs import Ref
from dulwich.repo import Repo

from pallas_hub.registry.server.names import check_ref_name
from pallas_hub.registry.server.objects import Objects
from pallas_hub.registry.server.payload import Changes, read_payload
from pallas_hub.registry.server.protocol import HubError, entry_not_found, revision_not_found
from pallas_hub.registry.server.reading import Snapshot, read_ref, snapshot
from pallas_hub.registry.server.store import AUTHOR, DEFAULT_BRANCH, new_commit


def commit(repo: Repo, repo_id: str, branch: str, lines: Iterable[bytes], sizes: dict[bytes, int]) -> str:
    """Apply the commit request to the branch; return the new commit id, or the old one if nothing changed."""
    branch = branch.removeprefix("refs/heads/")
    ref = b"refs/heads/" + branch.encode("utf-8", "replace")
    old = read_ref(repo, ref)
    if old is None:
        raise revision_not_found(repo_id, branch)
    snap = snapshot(repo, repo_id, ref.decode(), sizes)
    objects = Objects(repo)
    try:
        new = _make_commit(objects, snap, branch, lines)
        if new is None:
            return old.decode()
        move_ref(repo, repo_id, ref, old, new.id)
    except BaseException:
        if read_ref(repo, ref) == old:  # else the branch may need them
            objects.forget()
        raise
    return new.id.decode()


def _make_commit(objects: Objects, snap: Snapshot, branch: str, lines: Iterable[bytes]) -> Commit | None:
    changes = Changes()
    written: dict[bytes, ObjectID] = {}
    for path, blob in read_payload(lines, changes):
        objects.add(blob)
        written[path] = blob.id
    _check_parent(changes, snap, branch)
    files = snap.files()
    _delete(files, changes, snap)
    for path, sha in written.items():
        mode, _ = files.get(path, (0o100644, sha))
        files[path] = (mode, sha)
    _check_no_file_is_a_folder(files)
    trees = MemoryObjectStore()
    tree = commit_tree(trees, [(path, sha, mode) for path, (mode, sha) in files.items()])
    if tree == snap.commit.tree:
        return None
    for sha in trees:
        objects.add(trees[sha])
    new = new_commit(tree, [snap.commit.id], changes.message)
    objects.add(new)
    return new


def _check_parent(changes: Changes, snap: Snapshot, branch: str) -> None:
    parent = changes.parent
    if parent is None:
        return
    if len(parent) < 7 or not snap.sha.startswith(parent.lower()):
        raise HubError(
            412,
            f"{snap.repo_id}: branch {branch} must be at parentCommit {parent}, but is at {snap.sha}: "
            "somebody else has committed. Fetch it and try again.",
        )


def _delete(files: dict[bytes, tuple[int, ObjectID]], changes: Changes, snap: Snapshot) -> None:
    for path in changes.deleted_files:
        if files.pop(path, None) is None:
            raise entry_not_found(snap.repo_id, path.decode(), snap.sha)
    for folder in changes.deleted_folders:
        inside = [path for path in files if path.startswith(folder + b"/")]
        if not inside:
            raise entry_not_found(snap.repo_id, folder.decode() + "/", snap.sha)
        for path in inside:
            del files[path]


def _check_no_file_is_a_folder(files: dict[bytes, tuple[int, ObjectID]]) -> None:
    for path in files:
        parts = path.split(b"/")
        for depth in range(1, len(parts)):
            folder = b"/".join(parts[:depth])
            if folder in files:
                raise HubError(
                    400,
                    f"{folder.decode()!r} cannot be a file and the folder of {path.decode()!r} at once. "
                    "Delete the file in the same commit.",
                )


def move_ref(repo: Repo, repo_id: str, ref: bytes, old: ObjectID, new: ObjectID) -> None:
    """Move `ref` from `old` to `new`; HubError 412 if it is elsewhere by now (git push in the store)."""
    if not repo.refs.set_if_equals(Ref(ref), old, new):
        raise HubError(412, f"{repo_id}: {ref.decode()} moved away from {old.decode()} meanwhile. Try again.")


def create_branch(repo: Repo, repo_id: str, branch: object, start: str, sizes: dict[bytes, int]) -> None:
    name = check_ref_name(branch, "branch")
    sha = snapshot(repo, repo_id, start, sizes).commit.id
    _create_ref(repo, repo_id, b"refs/heads/", name, sha)


def create_tag(
    repo: Repo, repo_id: str, tag: object, revision: str, message: str | None, sizes: dict[bytes, int]
) -> None:
    name = check_ref_name(tag, "tag")
    sha = snapshot(repo, repo_id, revision, sizes).commit.id
    if read_ref(repo, b"refs/tags/" + name.encode()) is None and message:
        annotated = Tag()
        annotated.name = name.encode()
        annotated.object = (Commit, sha)
        annotated.tagger = AUTHOR
        annotated.tag_time = int(time.time())
        annotated.tag_timezone = 0
        annotated.message = message.encode("utf-8", "replace") + b"\n"
        Objects(repo).add(annotated)
        sha = annotated.id
    _create_ref(repo, repo_id, b"refs/tags/", name, sha)


def _create_ref(repo: Repo, repo_id: str, prefix: bytes, name: str, sha: ObjectID) -> None:
    kind = "branch" if prefix == b"refs/heads/" else "tag"
    encoded = name.encode()
    for existing in repo.refs.subkeys(Ref(prefix)):
        if existing == encoded:
            raise HubError(409, f"{kind} {name!r} exists already in {repo_id}.")
        # git keeps refs as files, so 'a' and 'a/b' exclude each other.
        if existing.startswith(encoded + b"/") or encoded.startswith(existing + b"/"):
            raise HubError(409, f"{kind} {name!r} collides with {kind} {existing.decode()!r} in {repo_id}.")
    if not repo.refs.add_if_new(Ref(prefix + encoded), sha):
        raise HubError(409, f"{kind} {name!r} exists already in {repo_id}.")


def delete_ref(repo: Repo, repo_id: str, kind: str, name: str) -> None:
    """Delete a branch (never main) or a tag; HubError 404 if there is none."""
    if kind == "branch" and name == DEFAULT_BRANCH:
        raise HubError(400, f"branch {DEFAULT_BRANCH!r} of {repo_id} cannot be deleted.")
    prefix = b"refs/heads/" if kind == "branch" else b"refs/tags/"
    ref = prefix + name.encode("utf-8", "replace")
    old = read_ref(repo, ref)
    if old is None:
        raise revision_not_found(repo_id, name)
    if not repo.refs.remove_if_equals(Ref(ref), old):
        raise HubError(409, f"{kind} {name!r} of {repo_id} moved meanwhile. Try again.")
