"""The body of a commit request: one JSON object per line, a header, then what to write and what to delete."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dulwich.objects import Blob

from pallas_hub.registry.server.names import check_file_path
from pallas_hub.registry.server.protocol import HubError


@dataclass
class Changes:
    """What one commit does. Deletions come first, whatever their place in the request."""

    title: str = ""
    description: str = ""
    parent: str | None = None
    deleted_files: list[bytes] = field(default_factory=list)
    deleted_folders: list[bytes] = field(default_factory=list)

    @property
    def message(self) -> bytes:
        text = f"{self.title.strip()}\n\n{self.description.strip()}".strip()
        return (text or "no message").encode("utf-8", "replace") + b"\n"


def read_payload(lines: Iterable[bytes], changes: Changes) -> Iterator[tuple[bytes, Blob]]:
    """Yield (path, blob) for each file and fill `changes` with all the rest; HubError 400 for anything else.

    A generator, so that the caller can store one file before the next is decoded.
    """
    header_seen = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        key, value = _read_line(number, line)
        if key == "header":
            header_seen = True
            _read_header(value, changes)
        elif key == "file":
            yield check_file_path(value.get("path")), _read_content(value)
        elif key == "deletedFile":
            changes.deleted_files.append(check_file_path(value.get("path")))
        elif key == "deletedFolder":
            changes.deleted_folders.append(check_file_path(str(value.get("path") or "").rstrip("/")))
        elif key == "lfsFile":
            raise HubError(
                400,
                f"file {value.get('path')!r}: this server stores every file in git; it has no LFS or Xet "
                "storage. Upload through huggingface_hub, which asks the server first.",
            )
        else:
            raise HubError(400, f"commit line {number}: unknown key {key!r}.")
    if not header_seen:
        raise HubError(400, "a commit needs a 'header' line; the request has none. Was it cut short?")


def _read_line(number: int, line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        item = json.loads(line)
        key, value = item["key"], item["value"]
    except (ValueError, KeyError, TypeError):
        raise HubError(400, f'commit line {number} must be {{"key": ..., "value": ...}}; got {line[:80]!r}.') from None
    if not isinstance(value, dict):
        raise HubError(400, f"commit line {number}: the value of {key!r} must be an object; got {line[:80]!r}.")
    return str(key), value


def _read_header(value: dict[str, Any], changes: Changes) -> None:
    changes.title = str(value.get("summary") or "")
    changes.description = str(value.get("description") or "")
    parent = value.get("parentCommit")
    if parent is not None and not isinstance(parent, str):
        raise HubError(400, f"parentCommit must be a commit id; got {parent!r}.")
    changes.parent = parent


def _read_content(value: dict[str, Any]) -> Blob:
    path, content, encoding = value.get("path"), value.get("content"), value.get("encoding", "utf-8")
    if not isinstance(content, str):
        raise HubError(400, f"file {path!r}: 'content' must be a string.")
    if encoding == "utf-8":
        return Blob.from_string(content.encode("utf-8", "surrogatepass"))
    if encoding != "base64":
        raise HubError(400, f"file {path!r}: encoding must be 'base64' or 'utf-8'; got {encoding!r}.")
    try:
        return Blob.from_string(base64.b64decode(content, validate=True))
    except (binascii.Error, ValueError):
        raise HubError(400, f"file {path!r}: content is not valid base64.") from None
