from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from pallas_hub.registry.server import Hub, running_hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A server in this process over a store of its own."""
    with running_hub(tmp_path / "store") as running:
        yield running


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


@pytest.fixture
def repo(api: HfApi) -> str:
    """A repo with branch v1, still without files."""
    api.create_repo("acme/tiny-kernel", repo_type="kernel")
    api.create_branch("acme/tiny-kernel", branch="v1", repo_type="kernel")
    return "acme/tiny-kernel"
