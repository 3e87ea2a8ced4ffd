"""Files that several commands may write at once: a reader sees the old text or the new one, and no change is lost."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator
from pathlib import Path


def check_writable(path: Path, name: str) -> None:
    """To be told before minutes of compiling.

    Raises   ValueError: `path`, given by the option `name`, is a folder, or its folder is not there or not writable.
    """
    if path.is_dir():
        raise ValueError(f"{name} takes a file; got the folder {path}.")
    folder = next(above for above in (path.absolute().parent, *path.absolute().parents) if above.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name} takes a file in a folder that can be written to; got {path}: {folder} can't.")


def replace_text(path: Path, text: str) -> None:
    """Write `text` beside `path` and put it in its place, with the folders above; what is no plain file stays one."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """No other process is inside this at the same time, for the same folder: read, change and write there."""
    try:
        import fcntl
    except ImportError:  # Windows, where there is no TPU compiler either
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
