"""The registry's commands: each has help with an example, JSON for machines, and exit code 1 with one clear line."""

import json
import shutil
from pathlib import Path

import pytest
from registry_shelf import Shelf, point_clients_at

from pallas_hub.cli import main
from pallas_hub.registry import paths

REPO = "pallas-hub/tiny-scale"


@pytest.fixture(autouse=True)
def shelf_is_the_package(shelf: Shelf, monkeypatch, tmp_path: Path) -> None:
    """Make the commands see the shelf: its paths replace the package's own, in the one object that holds them."""
    for field in ("kernels", "manifests", "bridge"):
        monkeypatch.setitem(paths.OUR_SOURCES.__dict__, field, getattr(shelf.sources, field))
    monkeypatch.chdir(tmp_path)


def words(capsys) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.parametrize("command", ["list", "info", "build", "publish", "download", "verify", "lock"])
def test_help_shows_an_example(command: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"example: pallas-hub {command}" in words(capsys)[0]


def test_the_whole_way_from_source_to_a_locked_kernel(shelf: Shelf, hub_url: str, capsys, tmp_path: Path):
    assert main(["build", "tiny-scale", "--record"]) == 0
    assert main(["build", "tiny-scale", "--check"]) == 0
    assert words(capsys)[0].splitlines() == [
        "tiny-scale v1: recorded in hub_manifests",
        "tiny-scale v1: as recorded in hub_manifests",
    ]
    assert main(["build", "tiny-scale"]) == 0
    assert "built torch-cpu, torch-cuda, torch-tpu in dist/kernels/tiny-scale" in words(capsys)[0]
    assert main(["verify", "dist/kernels/tiny-scale", "--released", "--json"]) == 0
    reports = json.loads(words(capsys)[0])
    assert [(row["variant"], row["files"], row["released"]) for row in reports] == [
        ("torch-cpu", 4, True),
        ("torch-cuda", 4, True),
        ("torch-tpu", 4, True),
    ]
    assert main(["publish", "tiny-scale", "--dry-run"]) == 0
    assert words(capsys)[0].startswith(f"would push to {REPO} v1 on {hub_url}:\n  + LICENSE")
    assert main(["publish", "tiny-scale", "--json"]) == 0
    commit = json.loads(words(capsys)[0])["commit"]
    assert main(["publish", "tiny-scale"]) == 0
    assert words(capsys)[0] == f"{REPO} v1 on {hub_url} is up to date; nothing to push.\n"
    assert main(["lock", f"{REPO}@1", "--output", "kernels.lock", "--json"]) == 0
    assert json.loads(words(capsys)[0])["locks"] == {f"{REPO}@v1": commit}
    assert main(["download", REPO, "--json"]) == 0
    assert json.loads(words(capsys)[0])["variants"] == ["torch-cpu", "torch-cuda", "torch-tpu"]
    assert main(["verify", REPO, "--version", "1"]) == 0
    assert "tiny-scale v1 torch-cpu: 4 files intact, listed in hub_manifests" in words(capsys)[0]
    assert main(["info", "tiny-scale"]) == 0
    text = words(capsys)[0]
    assert "  scale(x: Tensor, factor: float=2.0) -> Tensor" in text
    assert f"On {hub_url}: v1 ({commit[:12]})" in text
    assert "torch-cpu    fits this machine" in text
    assert "torch-tpu    rejected: backend (tpu) does not match" in text
    assert main(["list", "--json"]) == 0
    assert json.loads(words(capsys)[0])[0] == {
        "name": "tiny-scale",
        "repo_id": REPO,
        "versions": [1],
        "license": "Apache-2.0",
        "description": "",
    }


def test_after_download_offline_works(shelf: Shelf, hub_url: str, tmp_path: Path, monkeypatch, capsys):
    from pallas_hub.registry.load import get_kernel, loaded_from

    shelf.publish()
    assert main(["download", REPO]) == 0
    point_clients_at("http://127.0.0.1:9", tmp_path / "hf", monkeypatch, offline=True)
    assert loaded_from(get_kernel(REPO)).source == "cache"
    assert main(["download", REPO]) == 0
    assert "verified in" in words(capsys)[0]
    assert main(["info", REPO]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "nope"], "no kernel 'nope' in"),
        (["build"], "name a kernel to build. Kernels here: absolute-import"),
        (["build", "no-all"], "no __all__"),
        (["build", "tiny-scale", "--check"], "no manifest in"),
        (["build", "tiny-scale", "no-all", "--out", "x"], "--out takes one kernel at a time"),
        (["publish", "tiny-scale"], "Run: pallas-hub build tiny-scale --record"),
        (["verify", "."], "no kernel here"),
        (["verify", "tiny-scale"], "Did you mean 'pallas-hub/tiny-scale'?"),
        (["download", "pallas-hub/nope"], "no kernel repo of that name on"),
        (["info", "pallas-hub/nope"], "no kernel repo of that name on"),
        (["lock", "pallas-hub/nope"], "name kernels as org/name@version"),
        (["lock"], "pyproject.toml does not exist"),
    ],
)
def test_errors_are_one_message_and_exit_code_1(hub_url: str, arguments: list[str], message: str, capsys):
    assert main(arguments) == 1
    out, err = words(capsys)
    assert out == ""
    assert err.startswith(f"pallas-hub {arguments[0]}: ")
    assert message in err
    assert "Traceback" not in err


def test_verify_names_the_damaged_file(shelf: Shelf, capsys):
    main(["build", "tiny-scale"])
    words(capsys)
    assert main(["verify", "dist/kernels/tiny-scale", "--released"]) == 1
    assert "not released builds of this package: torch-cpu, torch-cuda, torch-tpu" in words(capsys)[1]
    Path("dist/kernels/tiny-scale/build/torch-tpu/op.py").write_text("")
    assert main(["verify", "dist/kernels/tiny-scale"]) == 1
    assert "op.py: wanted" in words(capsys)[1]
    shutil.rmtree("dist")


def test_a_hub_that_is_down_is_part_of_the_answer(shelf: Shelf, tmp_path: Path, monkeypatch, capsys):
    point_clients_at("http://127.0.0.1:9", tmp_path / "hf", monkeypatch)
    main(["build", "tiny-scale", "--record"])
    words(capsys)
    assert main(["info", "tiny-scale"]) == 0
    out = words(capsys)[0]
    assert "Hub: pallas-hub/tiny-scale: the Hub at http://127.0.0.1:9 cannot be reached" in out
    for command in ("download", "verify"):
        assert main([command, REPO]) == 1
        assert "cannot be reached" in words(capsys)[1]
    assert main(["lock", f"{REPO}@1"]) == 1
    assert "cannot be reached" in words(capsys)[1]


def test_publish_names_a_large_variant_once():
    from pallas_hub.cli.publish import _text
    from pallas_hub.registry.publish import Published

    cpu = [f"build/torch-cpu/{place}.py" for place in ("__init__", "a/b", "a/c", "d", "e", "f")]
    added = ["LICENSE", *cpu, "build/torch-tpu/__init__.py"]
    done = Published(REPO, version=1, endpoint="http://hub", branch="v1", dry_run=False, added=added)
    assert _text(done).splitlines()[1:] == [
        "  + LICENSE",
        "  + build/torch-cpu/ (6 files)",
        "  + build/torch-tpu/__init__.py",
    ]
