"""hub_manifests/<name>.toml: what each published version promises, and which builds of it are ours.

The format is documented field by field in hub_manifests/README.md. A manifest is written by
`pallas-hub build NAME --record` and never by hand, except for `description` and `dtypes`.
"""

import json
import os
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from pallas_hub.registry.api import Api
from pallas_hub.registry.errors import ManifestError, SourceError
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id

_HEADER = "# Written by `pallas-hub build {name} --record`; the fields are explained in README.md of this folder.\n"


@dataclass
class Build:
    """One build of a version. `released` builds are frozen: they stay trusted for good."""

    digests: dict[str, str]  # variant -> tree digest
    released: bool = False


@dataclass
class Version:
    api: Api
    variants: list[str]
    dtypes: list[str] = field(default_factory=list)
    builds: list[Build] = field(default_factory=list)


@dataclass
class Manifest:
    name: str
    repo_id: str
    license: str
    description: str = ""
    upstream: str = ""
    versions: dict[int, Version] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        return max(self.versions, default=None)


@dataclass(frozen=True)
class Listed:
    """Where a tree digest was found."""

    name: str
    version: int
    variant: str


def manifest_path(name: str, sources: Sources = OUR_SOURCES) -> Path:
    return sources.manifests / f"{name}.toml"


def read_manifest(name: str, sources: Sources = OUR_SOURCES) -> Manifest | None:
    """The manifest of a kernel, or None if none was recorded yet."""
    path = manifest_path(name, sources)
    if not path.is_file():
        return None
    try:
        manifest = _from_toml(tomllib.loads(path.read_text(encoding="utf-8")))
        if manifest.name != name:
            raise ValueError(f"name is {manifest.name!r}, the file is called {path.name}")
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, SourceError) as error:
        raise ManifestError(
            f"{path}: not a valid manifest ({type(error).__name__}: {error}). Restore it from version "
            f"control, or delete it and run: pallas-hub build {name} --record"
        ) from error


def read_all(sources: Sources = OUR_SOURCES) -> list[Manifest]:
    found = (read_manifest(path.stem, sources) for path in sorted(sources.manifests.glob("*.toml")))
    return [manifest for manifest in found if manifest is not None]


def find_digest(digest: str, sources: Sources = OUR_SOURCES) -> list[Listed]:
    """Every place in hub_manifests/ that lists this tree digest (the variants of one build may share it)."""
    return [
        Listed(manifest.name, number, variant)
        for manifest in read_all(sources)
        for number, version in manifest.versions.items()
        for build in version.builds
        for variant, known in build.digests.items()
        if known == digest
    ]


def write_manifest(manifest: Manifest, sources: Sources = OUR_SOURCES) -> Path:
    """Write atomically; the same manifest always gives the same bytes."""
    path = manifest_path(manifest.name, sources)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{manifest.name}.", suffix=".toml")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(_to_toml(manifest))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _from_toml(data: dict) -> Manifest:
    versions = {}
    for key, table in data.get("versions", {}).items():
        if int(key) < 1:
            raise ValueError(f"versions count from 1, got {key}")
        versions[int(key)] = Version(
            api=Api(
                names=dict(table["api"]),
                layers={name: dict(layer) for name, layer in table["layers"].items()},
            ),
            variants=list(table["variants"]),
            dtypes=list(table.get("dtypes", [])),
            builds=[Build(dict(build["digests"]), bool(build["released"])) for build in table["builds"]],
        )
    return Manifest(
        name=data["name"],
        repo_id=check_repo_id(data["repo-id"]),
        license=data["license"],
        description=data.get("description", ""),
        upstream=data.get("upstream", ""),
        versions=versions,
    )


def _to_toml(manifest: Manifest) -> str:
    lines = [
        _HEADER.format(name=manifest.name),
        f"name = {_text(manifest.name)}",
        f"repo-id = {_text(manifest.repo_id)}",
        f"license = {_text(manifest.license)}",
        f"description = {_text(manifest.description)}",
        f"upstream = {_text(manifest.upstream)}",
    ]
    for number, version in sorted(manifest.versions.items()):
        table = f"versions.{number}"
        lines += [
            "",
            f"[{table}]",
            f"variants = {_text(version.variants)}",
            f"dtypes = {_text(version.dtypes)}",
        ]
        lines += ["", f"[{table}.api]"]
        lines += [f"{_text(name)} = {_text(text)}" for name, text in sorted(version.api.names.items())]
        lines += ["", f"[{table}.layers]"]
        for layer, facts in sorted(version.api.layers.items()):
            inline = ", ".join(f"{key} = {_text(value)}" for key, value in sorted(facts.items()))
            lines.append(f"{_text(layer)} = {{ {inline} }}")
        for build in version.builds:
            lines += ["", f"[[{table}.builds]]", f"released = {_text(build.released)}"]
            lines.append(f"[{table}.builds.digests]")
            lines += [f"{_text(variant)} = {_text(digest)}" for variant, digest in sorted(build.digests.items())]
    return "\n".join(lines) + "\n"


def _text(value: str | bool | list[str]) -> str:
    # JSON's strings, booleans and lists of strings are TOML too (all our text is free of control characters).
    return json.dumps(value, ensure_ascii=False)
