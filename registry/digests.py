"""Hash the files of a build variant and compare them with what its metadata promises.

The rules are those of the `kernels` library (tests compare the two): every file counts except the top-level
metadata.json, its signature, and bytecode; links to files are followed. The tree digest puts the per-file hashes into
one line that `sha256sum` can reproduce: sha256 over "<hex>  <path>\\n" for each file, sorted by path.
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from pallas_hub.registry.errors import DigestMismatch

_NOT_HASHED = {"metadata.json", "metadata.json.sigstore"}


def encode(data: bytes, algorithm: str = "sha256") -> str:
    """Hash of a file's bytes as metadata.json spells it: base64."""
    return base64.b64encode(hashlib.new(algorithm, data).digest()).decode()


def hash_files(files: dict[str, bytes]) -> dict[str, str]:
    """Path -> base64 sha256, for files in memory."""
    return {path: encode(data) for path, data in sorted(files.items())}


def hash_variant(variant: Path, algorithm: str = "sha256") -> dict[str, str]:
    """Path -> base64 hash, for a build variant on disk."""
    hashes = {}
    for path in sorted(_walk(variant)):
        # A link whose target is gone, as in a half-deleted cache, is the same as a missing file; a pipe would block us.
        if (variant / path).is_file():
            hashes[path] = encode((variant / path).read_bytes(), algorithm)
    return hashes


def tree_digest(files: dict[str, str]) -> str:
    """One digest for a whole variant, from its per-file sha256 hashes."""
    total = hashlib.sha256()
    for path, digest in sorted(files.items()):
        total.update(f"{base64.b64decode(digest).hex()}  {path}\n".encode())
    return f"sha256:{total.hexdigest()}"


def promised(metadata: dict) -> tuple[str, dict[str, str]] | None:
    """(algorithm, path -> hash) from a parsed metadata.json, or None if it promises nothing."""
    digest = metadata.get("digest")
    if not isinstance(digest, dict) or not isinstance(digest.get("files"), dict):
        return None
    return str(digest.get("algorithm", "sha256")), dict(digest["files"])


def read_metadata(variant: Path) -> dict:
    path = variant / "metadata.json"
    try:
        metadata = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DigestMismatch(f"{variant}: no metadata.json, so nothing says what this build should hold.") from None
    except (ValueError, RecursionError) as error:
        raise DigestMismatch(f"{path}: not valid JSON ({error}); fetch the kernel again.") from error
    if not isinstance(metadata, dict):
        raise DigestMismatch(f"{path}: must hold a JSON object; fetch the kernel again.")
    return metadata


def verify_variant(variant: Path, wanted: dict[str, str], *, mend: str, algorithm: str = "sha256") -> None:
    """Raise DigestMismatch, naming each file, unless `variant` holds exactly the `wanted` files."""
    if algorithm not in ("sha256", "sha512"):
        raise DigestMismatch(f"{variant}: digest algorithm must be sha256 or sha512; metadata.json says {algorithm!r}.")
    got = hash_variant(variant, algorithm)
    faults = [*_faults(wanted, got), *_not_hashable(variant)]
    if faults:
        raise DigestMismatch(f"{variant}: refused before running any of its code. {'; '.join(faults)}. {mend}")


def _faults(wanted: dict[str, str], got: dict[str, str]) -> Iterator[str]:
    for path in sorted(wanted.keys() | got.keys()):
        if path not in got:
            yield f"{path}: wanted {wanted[path]}, got no such file"
        elif path not in wanted:
            yield f"{path}: not listed in metadata.json, got {got[path]}"
        elif wanted[path] != got[path]:
            yield f"{path}: wanted {wanted[path]}, got {got[path]}"


def _not_hashable(variant: Path) -> Iterator[str]:
    """What no digest can cover: folders behind links, where more files may lie, and pipes, which block their reader."""
    for folder, subfolders, names in os.walk(variant):
        for path in (Path(folder) / name for name in [*subfolders, *names]):
            if path.exists() and not path.is_file() and (path.is_symlink() or not path.is_dir()):
                yield f"{path.relative_to(variant).as_posix()}: neither a file nor a folder of this kernel"


def _walk(variant: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(variant):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        for name in names:
            path = (Path(folder) / name).relative_to(variant).as_posix()
            if path not in _NOT_HASHED and not name.endswith((".pyc", ".pyo")):
                yield path
