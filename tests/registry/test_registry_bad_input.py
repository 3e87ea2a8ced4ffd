"""Bad repos, manifests, arguments and folders: the error names who is at fault, without a traceback."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from registry_shelf import REPO, Shelf, stranger, upload

from pallas_hub.cli import main
from pallas_hub.registry import local, paths
from pallas_hub.registry.build import build
from pallas_hub.registry.errors import DigestMismatch, LoadError, ManifestError, UnknownKernel, UnknownVersion
from pallas_hub.registry.load import get_kernel, load_source
from pallas_hub.registry.manifest import read_manifest
from pallas_hub.registry.record import record
from pallas_hub.registry.verify import download, verify


@pytest.fixture
def package(shelf: Shelf, monkeypatch) -> Shelf:
    """The shelf in place of the package's own kernels."""
    for field in ("kernels", "manifests", "bridge"):
        monkeypatch.setitem(paths.OUR_SOURCES.__dict__, field, getattr(shelf.sources, field))
    return shelf


def built(shelf: Shelf, folder: Path, **metadata: object) -> Path:
    """A build whose metadata.json was changed by hand."""
    place = build("tiny-scale", folder, sources=shelf.sources).path
    for path in place.glob("build/*/metadata.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), **metadata}))
    return place


def test_a_missing_dependency_is_named_and_not_the_kernel_that_wants_it(shelf: Shelf, hub_url: str, tmp_path: Path):
    upload(hub_url, REPO, built(shelf, tmp_path / "out", **{"kernel-depends": [{"repo-id": "a/gone", "version": 1}]}))
    with pytest.raises(UnknownKernel, match=r"^a/gone: no kernel repo of that name"):
        get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))


@pytest.mark.parametrize("name", ["", "os.path"])
def test_an_id_that_names_no_module_of_its_own_is_refused(shelf: Shelf, hub_url: str, tmp_path: Path, name: str):
    upload(hub_url, REPO, built(shelf, tmp_path / "out", id=name))
    with pytest.raises(LoadError, match=rf"the id in metadata.json must be the name of a module; got '{name}'"):
        get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))


def test_a_python_package_that_is_not_allowed_is_named_with_the_mend(shelf: Shelf, hub_url: str, tmp_path: Path):
    upload(hub_url, REPO, built(shelf, tmp_path / "out", **{"python-depends": ["jax"]}))
    with pytest.raises(
        LoadError, match=r"unsupported kernel dependency: jax\. .* has to drop it from python-depends\."
    ):
        get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))


def test_metadata_that_cannot_be_read_has_a_mend(shelf: Shelf, hub_url: str, tmp_path: Path):
    upload(hub_url, REPO, built(shelf, tmp_path / "out", version="1"))
    with pytest.raises(LoadError, match=rf"Cannot parse metadata .*\. Fetch it again \(pallas-hub download {REPO} --f"):
        get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))
    (tmp_path / "out/build/torch-cpu/metadata.json").write_text("[" * 100_000)
    with pytest.raises(DigestMismatch, match="not valid JSON"):
        verify(tmp_path / "out")


def test_a_commit_that_does_not_exist_is_an_unknown_version(shelf: Shelf, hub_url: str):
    shelf.publish()
    with pytest.raises(UnknownVersion, match=rf"{REPO} has no such revision on {hub_url}: 404 Not Found"):
        download(REPO, revision="0" * 40)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[versions.1]", "[versions.0]", "versions count from 1, got 0"),
        ('name = "tiny-scale"', 'name = "other"', "name is 'other', the file is called tiny-scale.toml"),
        ('repo-id = "pallas-hub/tiny-scale"', 'repo-id = "x"', "repo id must be 'organisation/name'"),
    ],
)
def test_manifests_that_break_their_rules_are_refused(shelf: Shelf, old: str, new: str, words: str):
    record("tiny-scale", shelf.sources)
    path = shelf.sources.manifests / "tiny-scale.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ManifestError, match=words):
        read_manifest("tiny-scale", shelf.sources)


def test_without_room_for_the_bundled_copy_both_folders_are_named(shelf: Shelf, tmp_path: Path, monkeypatch):
    def no_room(files: dict[str, bytes], place: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local, "write_tree", no_room)
    words = rf"written neither to {tmp_path / 'builds'}\S* nor to a temporary folder \(No space left on device\)"
    with pytest.raises(LoadError, match=rf"{words}\. Make room, or set PALLAS_HUB_CACHE or TMPDIR"):
        load_source("tiny-scale", sources=shelf.sources)


def test_a_user_without_a_home_has_a_folder_for_builds(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("PALLAS_HUB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert paths.cache_root() == Path(tempfile.gettempdir()) / f"pallas-hub-{os.getuid()}"


def test_two_versions_of_a_kernel_are_not_locked_as_one(package: Shelf, capsys):
    assert main(["lock", f"{REPO}@1", f"{REPO}@2"]) == 1
    assert f"{REPO}: one version per kernel; got 1 and 2." in capsys.readouterr().err


def test_a_program_may_change_its_directory_between_loading_and_first_use(shelf: Shelf, tmp_path: Path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PALLAS_HUB_CACHE", "builds-here")
    module = load_source("tiny-scale", sources=shelf.sources)
    assert (tmp_path / "builds-here").is_dir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert module.op.late() == "imported on first use"


def test_files_that_cannot_be_written_are_one_line(package: Shelf, tmp_path: Path, capsys):
    (tmp_path / "a-file").write_text("")
    assert main(["build", "tiny-scale", "--out", str(tmp_path / "a-file/out/x")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"pallas-hub build: {tmp_path / 'a-file'}")
    assert err.endswith(": Not a directory. Check its permissions, or choose another place.\n")


def test_info_refuses_a_version_that_does_not_exist(package: Shelf, hub_url: str, capsys):
    package.publish()
    assert main(["info", "tiny-scale", "--version", "7"]) == 1
    assert f"{REPO} has no version 7; versions on {hub_url}: v1." in capsys.readouterr().err


@pytest.mark.parametrize("command", [["download", REPO], ["verify", REPO], ["lock", f"{REPO}@1"], ["info", "a/b"]])
def test_a_folder_called_kernels_that_hides_the_library_is_named(tmp_path: Path, command: list[str]):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    line = [sys.executable, "-m", "pallas_hub", *command]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"'kernels' is {tmp_path / 'kernels/__init__.py'}; no other module may be called so" in done.stderr
