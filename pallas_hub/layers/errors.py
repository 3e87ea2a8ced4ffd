"""What kernelize can complain about."""

from __future__ import annotations


class NothingSwapped(ValueError):
    """strict=True and no layer of the model runs a Hub kernel."""


class NothingSwappedWarning(UserWarning):
    """No layer of the model runs a Hub kernel."""


class VerificationError(ValueError):
    """A swapped layer differs from the original by more than rounding explains. The model was put back."""
