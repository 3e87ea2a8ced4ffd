"""Which versions of Transformers and kernels work together, in words. Pure functions of version strings."""

from __future__ import annotations

import re

# Transformers accepts kernels in [lowest, highest) and otherwise acts as if kernels were not installed.
# First Transformers version that has the range -> the range. Read from transformers/utils/import_utils.py.
_RANGES: tuple[tuple[tuple[int, ...], str, str | None], ...] = (
    ((5, 20), "0.17.2", "0.18.0"),
    ((5, 23), "0.18.2", None),
)
TESTED_TRANSFORMERS = "5.22.2"
TESTED_KERNELS = "0.17.2"


def diagnose(transformers: str | None, kernels: str | None) -> str | None:
    """What is wrong with this pair of installed versions and how to mend it; None if nothing is.

    None as a version means that the package is not installed.
    """
    if kernels is None:
        return (
            "kernels is not installed: marked layers and Hub repos cannot be used. "
            f"Try: pip install kernels=={TESTED_KERNELS}"
        )
    if transformers is None:
        return None
    accepted = _accepted_kernels(_numbers(transformers))
    if accepted is None:
        return (
            f"transformers {transformers} is older than 5.20, the first that pallas-hub knows; kernelize was tested "
            f"with transformers {TESTED_TRANSFORMERS}. Try: pip install transformers=={TESTED_TRANSFORMERS}"
        )
    lowest, highest = accepted
    installed = _numbers(kernels)
    if installed >= _numbers(lowest) and (highest is None or installed < _numbers(highest)):
        return None
    wanted = f"kernels >= {lowest}" + ("" if highest is None else f", < {highest}")
    mend = f"pip install kernels=={lowest}"
    if _numbers(TESTED_KERNELS)[:2] == installed[:2]:
        mend = f"pip install transformers=={TESTED_TRANSFORMERS} (which accepts kernels {kernels}), or {mend}"
    return (
        f"transformers {transformers} wants {wanted} and treats kernels {kernels} as not installed: its layers are "
        f"not marked, KernelConfig and use_kernels=True do nothing useful. Try: {mend}"
    )


def diagnose_installed() -> str | None:
    """`diagnose` for what is installed here."""
    return diagnose(_installed("transformers"), _installed("kernels"))


def _accepted_kernels(transformers: tuple[int, ...]) -> tuple[str, str | None] | None:
    accepted = None
    for first, lowest, highest in _RANGES:
        if transformers >= first:
            accepted = (lowest, highest)
    return accepted


def _numbers(version: str) -> tuple[int, ...]:
    """ "5.23.0.dev0" -> (5, 23, 0): a development build behaves like the release it leads to."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise ValueError(f"diagnose: a version looks like 5.22.2; got {version!r}.")
    return tuple(int(part) for part in match.group().split("."))


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
