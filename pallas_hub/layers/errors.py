"""What kernelize can complain about."""

from __future__ import annotations

from pallas_hub.registry.errors import PallasHubError


class NothingSwapped(PallasHubError, ValueError):
    """strict=True and no layer of the model runs a Hub kernel."""


class NothingSwappedWarning(UserWarning):
    """No layer of the model runs a Hub kernel."""


class NothingQuantizedWarning(UserWarning):
    """No layer of the model has experts whose weights quantize_experts can take."""


class VerificationError(PallasHubError, ValueError):
    """A swapped layer differs from the original by more than rounding explains. The model was put back."""
