"""What is known about a kernel without running any of it: the manifest's record and what the Hub holds."""

from dataclasses import dataclass, field

from pallas_hub.registry import hub
from pallas_hub.registry.answers import plain_errors
from pallas_hub.registry.errors import PallasHubError, UnknownVersion
from pallas_hub.registry.manifest import Manifest, Version, read_all
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id


@dataclass
class Description:
    repo_id: str
    description: str = ""
    recorded: dict[int, Version] = field(default_factory=dict)
    endpoint: str = ""
    hub_versions: dict[int, str] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)  # variant -> "fits this machine" or why not
    hub_error: str = ""

    def to_json(self) -> dict:
        return {
            "repo_id": self.repo_id,
            "description": self.description,
            "versions": {
                str(number): {
                    "api": version.api.names,
                    "layers": version.api.layers,
                    "dtypes": version.dtypes,
                    "variants": version.variants,
                    "builds": [{"digests": build.digests, "released": build.released} for build in version.builds],
                }
                for number, version in self.recorded.items()
            },
            "hub": {
                "endpoint": self.endpoint,
                "error": self.hub_error or None,
                "versions": {str(number): commit for number, commit in self.hub_versions.items()},
                "variants": self.variants,
            },
        }


def describe(kernel: str, *, version: int | None = None, sources: Sources = OUR_SOURCES) -> Description:
    """Describe a kernel by its name in this package or its repo id.

    A Hub that cannot answer is part of the answer (`hub_error`), unless nothing at all is known about the kernel or
    it lacks the version asked for.
    """
    manifest = _manifest(kernel, sources)
    found = Description(repo_id=manifest.repo_id if manifest else check_repo_id(kernel))
    if manifest is not None:
        found.description, found.recorded = manifest.description, manifest.versions
    try:
        hub.require_kernels()
        found.endpoint = "the cache" if hub.is_offline() else hub.endpoint()
        _ask_hub(found, version)
    except PallasHubError as error:
        if manifest is None or isinstance(error, UnknownVersion):
            raise
        found.hub_error = str(error)
    return found


def _manifest(kernel: str, sources: Sources) -> Manifest | None:
    return next((entry for entry in read_all(sources) if kernel in (entry.name, entry.repo_id)), None)


def _ask_hub(found: Description, version: int | None) -> None:
    from kernels.variants import VariantAccepted, get_variants, resolve_variants

    offline = hub.is_offline()
    with plain_errors(found.repo_id):
        found.hub_versions = hub.versions(found.repo_id, from_cache=offline)
        if offline or not found.hub_versions:
            return
        chosen = version if version is not None else max(found.hub_versions)
        api = hub.client()
        commit = hub.find_commit(api, found.repo_id, chosen, None, from_cache=False)
        _, decisions = resolve_variants(get_variants(api, repo_id=found.repo_id, revision=commit))
    for decision in decisions:
        fits = isinstance(decision, VariantAccepted)
        found.variants[decision.variant.variant_str] = "fits this machine" if fits else f"rejected: {decision.reason}"
