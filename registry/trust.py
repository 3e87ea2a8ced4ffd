"""Who may run code here: released builds of ours without asking, anything else only with the caller's word.

Consent is for exact repo ids. An organisation that the Hub marks as a trusted publisher is not consent, and a list that
names one repo covers neither its neighbours nor the kernels it depends on.
"""

from dataclasses import dataclass

from pallas_hub.registry.digests import promised, tree_digest
from pallas_hub.registry.errors import DigestMismatch, NotTrusted
from pallas_hub.registry.manifest import find_digest
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id


@dataclass(frozen=True)
class Trust:
    """The caller's consent: everything this call needs (`everything`), or the repos named."""

    everything: bool = False
    repos: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, trust_remote_code: object) -> "Trust":
        """Read the `trust_remote_code` argument: False, True, or a list of exact repo ids."""
        if isinstance(trust_remote_code, bool):
            return cls(everything=trust_remote_code)
        if isinstance(trust_remote_code, list | tuple | set | frozenset):
            return cls(repos=frozenset(check_repo_id(repo_id) for repo_id in trust_remote_code))
        raise NotTrusted(
            "trust_remote_code must be False, True or a list of exact repo ids, as in "
            f'["pallas-hub/ragged-dot"]; got {trust_remote_code!r}.'
        )


def reason_to_trust(repo_id: str, metadata: dict, trust: Trust, sources: Sources = OUR_SOURCES) -> str:
    """Why this build may run once its files are verified against `metadata`; NotTrusted if nothing says so."""
    listed = _released(metadata, sources)
    if listed is not None:
        return listed
    if trust.everything:
        return "trust_remote_code=True"
    if repo_id in trust.repos:
        return f"trust_remote_code lists {repo_id}"
    raise NotTrusted(
        f"{repo_id}: refused before running any of its code: it is not a build listed in hub_manifests, and "
        "you gave no "
        f'consent for this repo. If you trust its authors, pass trust_remote_code=["{repo_id}"].'
    )


def _released(metadata: dict, sources: Sources) -> str | None:
    """The words for a build whose promised files are listed in hub_manifests.

    The digests cover the files and not metadata.json, so what it says besides must be what our builder writes: a forged
    module id could otherwise replace another module, and a forged dependency pull in a stranger's kernel.
    """
    from pallas_hub.registry.build import kernel_id

    promise = promised(metadata)
    if promise is None or promise[0] != "sha256":
        return None
    digest = tree_digest(promise[1])
    found = [entry for entry in find_digest(digest, sources) if entry.version == metadata.get("version")]
    found = [entry for entry in found if entry.name == metadata.get("name")]
    if not found:
        return None
    name, version = found[0].name, found[0].version
    backends = {entry.variant.removeprefix("torch-") for entry in found}
    if metadata.get("id") not in {kernel_id(name, version, backend, digest) for backend in backends}:
        raise DigestMismatch(
            f"{name} v{version}: metadata.json claims the id {metadata.get('id')!r}, which our builder did "
            "not write for these files; the repo was tampered with. Publish or fetch it again."
        )
    if metadata.get("kernel-depends") or metadata.get("python-depends"):
        raise DigestMismatch(
            f"{name} v{version}: metadata.json adds dependencies that the released build does not have; the repo was "
            "tampered with. Publish or fetch it again."
        )
    return f"listed in hub_manifests ({name} v{version})"
