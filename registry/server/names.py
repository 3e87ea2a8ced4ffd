"""Names a client may use: repo ids, branch and tag names, paths inside a repo; anything else is refused."""

from __future__ import annotations

import re

from dulwich.index import validate_path_element_hfs, validate_path_element_ntfs
from dulwich.refs import Ref, check_ref_format

from pallas_hub.registry.server.protocol import HubError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_SHA = re.compile(r"[0-9a-f]{40}")
# First path segments with a meaning of their own in the protocol.
_RESERVED_OWNERS = frozenset({"api", "kernels", "models", "datasets", "spaces"})
_MAX_NAME = 96
_MAX_REF = 200
_MAX_PATH = 1024


def is_sha(text: str) -> bool:
    """True for a full commit id: 40 lowercase hexadecimal digits."""
    return _SHA.fullmatch(text) is not None


def check_repo_id(owner: str | None, name: str | None) -> str:
    """The repo id `owner/name`, or HubError 400 if either part is not a plain name."""
    if not isinstance(owner, str) or not isinstance(name, str) or not owner or not name:
        raise HubError(400, f"repo id must be 'org/name'; got organization {owner!r} and name {name!r}.")
    repo_id = f"{owner}/{name}"
    for part in (owner, name):
        if not _NAME.fullmatch(part) or ".." in part or "--" in part or len(part) > _MAX_NAME:
            raise HubError(
                400,
                f"repo id {repo_id!r}: {part!r} is not a valid name; use letters, digits, '-', '_' and '.', "
                f"start and end with a letter or digit, no '--' or '..', at most {_MAX_NAME} characters.",
            )
    if name.lower().endswith((".git", ".lock")):
        raise HubError(400, f"repo id {repo_id!r}: a name must not end with '.git' or '.lock'.")
    if owner.lower() in _RESERVED_OWNERS:
        raise HubError(400, f"repo id {repo_id!r}: {owner!r} is reserved; choose another organisation.")
    return repo_id


def check_ref_name(name: object, kind: str) -> str:
    """A new branch or tag name by git's own rules, or HubError 400. `kind` is 'branch' or 'tag'."""
    if not isinstance(name, str) or not name:
        raise HubError(400, f"{kind} name must be a non-empty string; got {name!r}.")
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise HubError(400, f"{kind} name {name!r} is not valid text.") from None
    if len(encoded) > _MAX_REF:
        raise HubError(400, f"{kind} name must have at most {_MAX_REF} bytes; got {len(encoded)}.")
    reserved = name.startswith(("-", "refs/")) or name == "HEAD" or is_sha(name)
    if reserved or not check_ref_format(Ref(b"refs/heads/" + encoded)):
        raise HubError(
            400,
            f"{kind} name {name!r} is not valid; git refuses spaces, '..', '~^:?*[\\', a leading '-' or '.', "
            "a trailing '/' or '.lock', and this server refuses 'HEAD', 'refs/...' and 40-digit commit ids.",
        )
    return name


def check_file_path(path: object) -> bytes:
    """A path inside a repo as bytes, or HubError 400: relative, normal, and nothing that git would refuse."""
    if not isinstance(path, str) or not path:
        raise HubError(400, f"file path must be a non-empty string; got {path!r}.")
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise HubError(400, f"file path {path!r} is not valid text.") from None
    if len(encoded) > _MAX_PATH:
        raise HubError(400, f"file path must have at most {_MAX_PATH} bytes; got {len(encoded)}: {path[:80]!r}...")
    if any(ord(c) < 32 or ord(c) == 127 for c in path) or "\\" in path:
        raise HubError(400, f"file path {path!r} has a control character or a backslash; use '/' between folders.")
    for part in encoded.split(b"/"):
        # The NTFS and HFS rules also refuse '.git' in the spellings those file systems take for it.
        if not part or not validate_path_element_ntfs(part) or not validate_path_element_hfs(part):
            raise HubError(
                400,
                f"file path {path!r} is refused; it must be relative, without empty, '.', '..' or '.git' parts.",
            )
    return encoded
