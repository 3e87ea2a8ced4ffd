"""Compare a build with what hub_manifests/ recorded for its version, and record a new one on purpose."""

from dataclasses import replace

from pallas_hub.registry.api import changes, read_api
from pallas_hub.registry.build import check
from pallas_hub.registry.digests import hash_files, tree_digest
from pallas_hub.registry.errors import ApiChanged, ManifestError
from pallas_hub.registry.manifest import Build, Manifest, Version, read_manifest, write_manifest
from pallas_hub.registry.paths import OUR_SOURCES, Sources
from pallas_hub.registry.source import KernelSource, read_source

__all__ = ["check_api", "check_recorded", "freeze", "read_api", "record"]


def check_api(source: KernelSource, sources: Sources = OUR_SOURCES, *, recording: bool = False) -> Manifest | None:
    """Raise ApiChanged if a use of the recorded API of this version would break. Returns the manifest, if any.

    recording   about to record: then a version that was never released may still change
    """
    api = check(source)
    manifest = read_manifest(source.name, sources)
    recorded = manifest.versions.get(source.version) if manifest else None
    if manifest is None or recorded is None:
        return manifest
    lost = changes(recorded.api, api)
    lost += [f"variant {variant} is gone" for variant in recorded.variants if variant not in source.variants]
    released = any(build.released for build in recorded.builds)
    if lost and (released or not recording):
        following = (manifest.newest or source.version) + 1
        what = f"{source.name}: the public API of version {source.version} changed: {'; '.join(lost)}."
        run = f"pallas-hub build {source.name} --record"
        bump = f"set version = {following} in {source.folder / 'build.toml'} and run: {run}"
        if released:
            raise ApiChanged(
                f"{what} A released version keeps what it once had (adding is fine). Restore it, or {bump}"
            )
        raise ApiChanged(
            f"{what} Restore it, or {bump} (the same command without a new version accepts the change, since version "
            f"{source.version} was never released)."
        )
    return manifest


def check_recorded(name: str, sources: Sources = OUR_SOURCES) -> None:
    """Raise ApiChanged or ManifestError unless hub_manifests/ lists the API and the digests of this very build."""
    source = read_source(name, sources)
    manifest = check_api(source, sources)
    mend = f"Run: pallas-hub build {name} --record"
    if manifest is None:
        raise ManifestError(f"{name}: no manifest in {sources.manifests}. {mend}")
    version = manifest.versions.get(source.version)
    if version is None:
        raise ManifestError(f"{name}: version {source.version} is not in its manifest. {mend}")
    digests = variant_digests(source)
    if digests not in [build.digests for build in version.builds]:
        raise ManifestError(
            f"{name} v{source.version}: the manifest does not list the digests of this build "
            f"({', '.join(sorted(set(digests.values())))}), so users would need trust_remote_code to load it. {mend}"
        )
    fields = {"license": (manifest.license, source.license), "repo-id": (manifest.repo_id, source.repo_id)}
    wrong = [f"{key} is {old!r}, build.toml says {new!r}" for key, (old, new) in fields.items() if old != new]
    new_api = check(source)
    if version.api != new_api:
        wrong.append("its [api] or [layers] tables lack what this build adds or renames")
    if wrong:
        raise ManifestError(f"{name} v{source.version}: the manifest is out of date: {'; '.join(wrong)}. {mend}")


def record(name: str, sources: Sources = OUR_SOURCES) -> Manifest:
    """Write the API and digests of the current build into hub_manifests/<name>.toml.

    The API of a released version may only grow, else ApiChanged. The build that was recorded last is replaced unless it
    was released; released builds stay.
    """
    source = read_source(name, sources)
    manifest = check_api(source, sources, recording=True) or Manifest(name, source.repo_id, source.license)
    manifest.repo_id, manifest.license = source.repo_id, source.license
    manifest.upstream = source.upstream or ""
    api, digests = check(source), variant_digests(source)
    old = manifest.versions.get(source.version) or Version(api=api, variants=[])
    kept = [build for build in old.builds if build.released]
    if digests not in [build.digests for build in kept]:
        kept.append(Build(digests))
    version = replace(old, api=api, variants=sorted(source.variants), builds=kept)
    manifest.versions[source.version] = version
    write_manifest(manifest, sources)
    return manifest


def freeze(name: str, version: int, digests: dict[str, str], sources: Sources = OUR_SOURCES) -> bool:
    """Mark a build as released, which keeps its digests trusted for good. True if the manifest changed."""
    manifest = read_manifest(name, sources)
    if manifest is None or version not in manifest.versions:
        return False
    for build in manifest.versions[version].builds:
        if build.digests == digests and not build.released:
            build.released = True
            write_manifest(manifest, sources)
            return True
    return False


def variant_digests(source: KernelSource) -> dict[str, str]:
    """Variant -> tree digest. All variants hold the same files, so the digests are equal today."""
    digest = tree_digest(hash_files(source.files))
    return dict.fromkeys(source.variants, digest)
