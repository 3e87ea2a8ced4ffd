"""Helpers of the registry tests: an editable copy of the fixture kernels, and Hub clients pointed at a server."""

import dataclasses
from pathlib import Path

import pytest

from pallas_hub.registry.paths import Sources
from pallas_hub.registry.publish import Published, publish
from pallas_hub.registry.record import record

FIXTURES = Path(__file__).parent / "fixture_kernels"
REPO = "pallas-hub/tiny-scale"
CLOSED = "http://127.0.0.1:9"  # the discard port: nothing listens there


@dataclasses.dataclass
class Shelf:
    """A copy of the fixture kernels that a test may edit. Each copy has its own content, hence its own module ids."""

    root: Path
    sources: Sources

    def package(self, name: str = "tiny-scale") -> Path:
        return self.root / "kernels" / name / "torch-ext" / name.replace("-", "_")

    def edit(self, file: str, old: str, new: str, name: str = "tiny-scale") -> None:
        """Replace text in a file of the kernel's folder."""
        path = self.root / "kernels" / name / file
        text = path.read_text()
        assert old in text, f"{path} does not hold {old!r}"
        path.write_text(text.replace(old, new))

    def append(self, file: str, text: str, name: str = "tiny-scale") -> None:
        with (self.package(name) / file).open("a") as stream:
            stream.write(text)

    def set_version(self, version: int, name: str = "tiny-scale") -> None:
        path = self.root / "kernels" / name / "build.toml"
        lines = [
            f"version = {version}" if line.startswith("version") else line for line in path.read_text().splitlines()
        ]
        path.write_text("\n".join(lines) + "\n")

    def publish(self, name: str = "tiny-scale", org: str | None = None, **options) -> Published:
        record(name, self.sources)
        return publish(name, org, sources=self.sources, **options)


def point_clients_at(url: str, home: Path, monkeypatch: pytest.MonkeyPatch, *, offline: bool = False) -> None:
    """HF_ENDPOINT and HF_HOME are read when huggingface_hub is imported: set them here and in its constants."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "any")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    # With telemetry off, kernels 0.17.2 sends a header that httpx refuses; see hub.client.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)


def stranger(shelf: Shelf) -> Sources:
    """The same user without any of the shelf's manifests or sources: nothing is released, nothing bundled."""
    return Sources(shelf.root / "no-kernels", shelf.root / "no-manifests", shelf.root / "bridge")


def upload(url: str, repo_id: str, folder: Path, branch: str = "v1", delete: str | None = None) -> str:
    """Push a folder as it is, without our publisher's checks."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=url, token="any")
    api.create_repo(repo_id, repo_type="kernel", exist_ok=True)
    api.create_branch(repo_id, branch=branch, repo_type="kernel", exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id, folder_path=folder, repo_type="kernel", revision=branch, delete_patterns=delete
    ).oid


def snapshot(repo_id: str = REPO) -> Path:
    from pallas_hub.registry import hub

    return next((hub.cache_folder(repo_id) / "snapshots").iterdir())


def with_marker(shelf: Shelf, tmp_path: Path) -> Path:
    marker = tmp_path / "code-ran"
    shelf.append("__init__.py", f"\nopen({str(marker)!r}, 'a').close()\n")
    return marker
