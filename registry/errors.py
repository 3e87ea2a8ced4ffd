"""Every error a user can meet, as one family: `except PallasHubError` catches them all.

The command line prints the message in one go and exits with 1, so each message names the cause and the mend.
"""


class PallasHubError(Exception):
    """Base of all errors that pallas-hub raises on purpose."""


class SourceError(PallasHubError):
    """A kernel source folder is missing, incomplete or malformed."""


class BuildRefused(PallasHubError):
    """The sources break a rule that every published kernel keeps."""


class ApiChanged(PallasHubError):
    """A published version would lose or change part of its public API."""


class ManifestError(PallasHubError):
    """A file in hub_manifests/ is missing, malformed or does not list this build."""


class PublishError(PallasHubError):
    """The Hub refused or interrupted a publish; what was published before is untouched."""


class HubUnavailable(PallasHubError):
    """The Hub cannot be reached and nothing local can stand in."""


class UnknownKernel(PallasHubError):
    """No repo of that name on the Hub, in the cache or in the package."""


class UnknownVersion(PallasHubError):
    """The repo exists but holds no such version or revision."""


class NoMatchingVariant(PallasHubError):
    """The repo holds builds, but none for this machine."""


class NotTrusted(PallasHubError):
    """The kernel is not a released build of ours and the caller gave no consent to run it."""


class DigestMismatch(PallasHubError):
    """A file is not the one that its metadata promises."""


class KernelsLibraryError(PallasHubError, ImportError):
    """The `kernels` library is missing or of a version this package was not made for."""


class LoadError(PallasHubError):
    """The kernel cannot be loaded as asked: a refusal of the Hub, a broken repo, a cache without room, a taken name."""


class LockError(PallasHubError):
    """A lock file is missing, malformed or does not hold the kernel."""
