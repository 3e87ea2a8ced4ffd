"""A loopback Hub that this process talks to, in place of the real one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_hub.registry.paths import OUR_SOURCES, Sources
from pallas_hub.registry.publish import publish
from pallas_hub.registry.record import record
from pallas_hub.registry.server import running_hub


@contextlib.contextmanager
def published(home: Path, *names: str, trusted: tuple[str, ...] = ("pallas-hub",)) -> Iterator[Sources]:
    """These kernels as the working tree has them. Who is not trusted there is loaded with consent only."""
    from huggingface_hub import constants

    sources = dataclasses.replace(OUR_SOURCES, manifests=home / "manifests")
    with running_hub(home / "store", trusted=list(trusted)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "any")
        patch.setenv("PALLAS_HUB_CACHE", str(home / "builds"))
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        # kernels 0.17.2 sends a header that httpx refuses when telemetry is off.
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
        for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
            patch.delenv(name, raising=False)
        for name in names:
            record(name, sources)
            publish(name, sources=sources)
        yield sources
