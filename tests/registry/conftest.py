"""A shelf of fixture kernels and a loopback Hub, with the Hub clients of this process pointed at it."""

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_shelf import FIXTURES, Shelf, point_clients_at

from pallas_hub.registry.paths import Sources

_numbers = itertools.count()


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    root = tmp_path / "shelf"
    shutil.copytree(FIXTURES, root)
    made = Shelf(root, Sources(kernels=root / "kernels", manifests=root / "manifests", bridge=root / "bridge"))
    made.append("op.py", f"\n# copy {next(_numbers)} of process {os.getpid()}\n")
    monkeypatch.setenv("PALLAS_HUB_CACHE", str(tmp_path / "builds"))
    return made


@pytest.fixture
def hub_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Hub on loopback; this process and its children talk to it, with an empty cache."""
    from pallas_hub.registry.server import running_hub

    with running_hub(tmp_path / "store", trusted=["pallas-hub"]) as hub:
        point_clients_at(hub.url, tmp_path / "hf", monkeypatch)
        yield hub.url
