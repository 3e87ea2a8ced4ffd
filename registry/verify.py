"""Check the files of a kernel against its metadata and against hub_manifests/. None of its code is run."""

from dataclasses import dataclass
from pathlib import Path

from pallas_hub.registry import fetch, hub
from pallas_hub.registry.answers import plain_errors
from pallas_hub.registry.digests import hash_variant, promised, read_metadata, tree_digest, verify_variant
from pallas_hub.registry.errors import DigestMismatch, HubUnavailable, NotTrusted, SourceError, UnknownKernel
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id
from pallas_hub.registry.trust import Trust, reason_to_trust


@dataclass(frozen=True)
class VariantReport:
    """The verdict on one build variant."""

    path: Path
    name: str
    version: int | None
    variant: str
    files: int
    digest: str
    released: bool  # listed in hub_manifests/: loads without trust_remote_code


def verify(target: str | Path, *, sources: Sources = OUR_SOURCES) -> list[VariantReport]:
    """Verify every variant below a folder: a variant, a build/ folder or a whole kernel repo.

    Raises   DigestMismatch: a file is not the promised one, or nothing is promised.  SourceError: no variant there.
    """
    folder = Path(target)
    variants = find_variants(folder)
    if not variants:
        raise SourceError(f"{folder}: no kernel here (no metadata.json in it, in <variant>/ or in build/<variant>/).")
    return [_verify_one(variant, sources) for variant in variants]


def verify_repo(
    repo_id: str, *, version: int | None = None, revision: str | None = None, sources: Sources = OUR_SOURCES
) -> list[VariantReport]:
    """Download a kernel repo whole and verify all its variants."""
    return verify(download(repo_id, version=version, revision=revision), sources=sources)


def download(repo_id: str, *, version: int | None = None, revision: str | None = None, force: bool = False) -> Path:
    """Fetch all variants of a kernel into the Hub cache, so that it works offline. It runs nothing and asks no trust.

    force   fetch again what is there already, to replace damaged files
    """
    hub.require_kernels()
    from kernels.hf_hub import CACHE_DIR

    api = hub.client()
    check_repo_id(repo_id)
    offline = hub.is_offline()
    if force and offline:
        raise HubUnavailable(f"{repo_id}: HF_HUB_OFFLINE=1, so nothing can be fetched again. Unset it first.")
    with plain_errors(repo_id):
        if version is None and revision is None:
            known = hub.versions(repo_id, from_cache=offline)
            if not known:
                where = f"in the cache {hub.cache_folder(repo_id)} (HF_HUB_OFFLINE=1)" if offline else hub.endpoint()
                raise UnknownKernel(f"{repo_id}: no version {'' if offline else 'on '}{where}.")
            version = max(known)
        commit = hub.find_commit(api, repo_id, version, revision, from_cache=offline)
        if force:
            fetch.discard_snapshot(repo_id, commit)
        folder = api.snapshot_download(
            repo_id,
            repo_type="kernel",
            revision=commit,
            cache_dir=CACHE_DIR,
            force_download=force,
        )
    fetch.write_ref(repo_id, f"v{version}" if version is not None else str(revision), commit)
    return Path(folder)


def find_variants(folder: Path) -> list[Path]:
    if (folder / "metadata.json").is_file():
        return [folder]
    found = sorted(path.parent for pattern in ("*/", "build/*/") for path in folder.glob(f"{pattern}metadata.json"))
    return found


def _verify_one(variant: Path, sources: Sources) -> VariantReport:
    metadata = read_metadata(variant)
    promise = promised(metadata)
    if promise is None:
        raise DigestMismatch(f"{variant}: metadata.json holds no digest, so nothing can be verified. Build it again.")
    mend = "Fetch it again (pallas-hub download ORG/NAME --force) or build it again."
    verify_variant(variant, promise[1], mend=mend, algorithm=promise[0])
    hashes = hash_variant(variant)
    return VariantReport(
        path=variant,
        name=str(metadata.get("name")),
        version=metadata.get("version"),
        variant=variant.name,
        files=len(hashes),
        digest=tree_digest(hashes),
        released=_is_released(metadata, sources),
    )


def _is_released(metadata: dict, sources: Sources) -> bool:
    try:
        reason_to_trust("this/build", metadata, Trust(), sources)
    except NotTrusted:
        return False
    return True
