"""Putting git objects into a repo so that neither a full disk nor a power cut leaves a broken one behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from dulwich.objects import ObjectID, ShaFile
from dulwich.repo import Repo

DRAFT = "tmp_obj_"  # git's own name for an object that is being written: `git prune` removes it, `git fsck` ignores it


class Objects:
    """Adds objects to a repo and remembers the new ones, so that a change that fails takes up no room."""

    def __init__(self, repo: Repo) -> None:
        self._repo = repo
        self._added: list[ObjectID] = []

    def add(self, obj: ShaFile) -> None:
        if obj.id not in self._repo.object_store:
            write_object(Path(self._repo.path), obj)
            self._added.append(obj.id)

    def forget(self) -> None:
        """Remove what was added; nothing may refer to it."""
        for sha in self._added:
            with contextlib.suppress(OSError):
                self._repo.object_store.delete_loose_object(sha)


def write_object(repo: Path, obj: ShaFile) -> None:
    """Write a loose object: on disk in full before it has its name. OSError leaves nothing behind.

    dulwich does the same for its own callers, but keeps file and lock when the disk is full.
    """
    name = obj.id.decode()
    folder = repo / "objects" / name[:2]
    folder.mkdir(exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=DRAFT, dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(obj.as_legacy_object())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, 0o444)
        os.replace(draft, folder / name[2:])
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
