"""Who may run code: consent for exact repos, released digests, tampered files and caches."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from registry_shelf import CLOSED, FIXTURES, REPO, Shelf, point_clients_at, snapshot, stranger, upload, with_marker

from pallas_hub.registry.digests import hash_variant
from pallas_hub.registry.errors import DigestMismatch, HubUnavailable, NotTrusted, PallasHubError
from pallas_hub.registry.load import get_kernel, has_kernel, loaded_from
from pallas_hub.registry.record import record

FIXTURE = FIXTURES / "kernels" / "tiny-scale" / "torch-ext" / "tiny_scale"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("promised", [False, True])
def test_kernels_of_other_builders_load_with_consent(shelf: Shelf, hub_url, tmp_path, nested: bool, promised: bool):
    """Older builds keep the package in a folder of its own, and may promise no digests."""
    from pallas_hub.registry.build import build

    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    for variant in (place / "build").iterdir():
        metadata = json.loads((variant / "metadata.json").read_text())
        if nested:
            (variant / "tiny_scale").mkdir()
            for path in variant.glob("*.py"):
                path.rename(variant / "tiny_scale" / path.name)
        metadata["digest"] = {"algorithm": "sha256", "files": hash_variant(variant)} if promised else None
        metadata["id"] += f"_{nested}_{promised}".lower()
        (variant / "metadata.json").write_text(
            json.dumps({key: value for key, value in metadata.items() if value is not None})
        )
    upload(hub_url, "somebody/older", place)
    with pytest.raises(NotTrusted):
        get_kernel("somebody/older", sources=stranger(shelf))
    module = get_kernel("somebody/older", trust_remote_code=["somebody/older"], sources=stranger(shelf))
    assert module.scale(torch.ones(1)).item() == 2.0
    assert module.op.late() == "imported on first use"
    assert (loaded_from(module).digest is not None) is promised


def test_a_strangers_code_does_not_run_without_consent(shelf: Shelf, hub_url: str, tmp_path: Path):
    marker = with_marker(shelf, tmp_path)
    shelf.publish(org="somebody")
    repo_id = "somebody/tiny-scale"
    unknown = stranger(shelf)
    for consent in (False, [], ["somebody/other"], [REPO]):
        with pytest.raises(
            NotTrusted, match=rf"{repo_id}: refused before running.*trust_remote_code=\[\"{repo_id}\"\]"
        ):
            get_kernel(repo_id, trust_remote_code=consent, sources=unknown)
    assert not marker.exists()
    downloaded = [path.name for path in snapshot(repo_id).rglob("*.py")]
    assert downloaded == [], "code was fetched before consent"
    module = get_kernel(repo_id, trust_remote_code=[repo_id], sources=unknown)
    assert marker.exists()
    assert loaded_from(module).trust == f"trust_remote_code lists {repo_id}"


def test_an_organisation_that_the_hub_trusts_is_not_consent(shelf: Shelf, hub_url: str, tmp_path: Path):
    marker = with_marker(shelf, tmp_path)
    shelf.publish()
    with pytest.raises(NotTrusted):
        get_kernel(REPO, sources=stranger(shelf))
    assert not marker.exists()
    assert (
        loaded_from(get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))).trust == "trust_remote_code=True"
    )


def test_an_untrusted_copy_in_the_cache_gives_way_to_the_bundled_one(
    shelf: Shelf, hub_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    marker = with_marker(shelf, tmp_path)
    shelf.publish()
    published = get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))
    marker.unlink()
    (shelf.package() / "__init__.py").write_text((FIXTURE / "__init__.py").read_text() + f"\n# {tmp_path}\n")
    (shelf.sources.manifests / "tiny-scale.toml").unlink()
    record("tiny-scale", shelf.sources)
    with pytest.raises(NotTrusted, match="refused before running"):  # what is on the Hub is what was asked for
        get_kernel(REPO, sources=shelf.sources)
    point_clients_at(CLOSED, tmp_path / "hf", monkeypatch)
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "bundled"
    assert "using the bundled copy, because: pallas-hub/tiny-scale: refused before running" in caplog.text
    assert not marker.exists()
    assert get_kernel(REPO, trust_remote_code=[REPO], sources=shelf.sources) is published


def test_consent_for_a_kernel_does_not_cover_what_it_depends_on(shelf: Shelf, hub_url: str, tmp_path: Path):
    from pallas_hub.registry.build import build

    marker = with_marker(shelf, tmp_path)
    shelf.publish(org="evil")
    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    for metadata in place.glob("build/*/metadata.json"):
        data = json.loads(metadata.read_text())
        data["id"] += "_outer"
        data["kernel-depends"] = [{"repo-id": "evil/tiny-scale", "version": 1}]
        metadata.write_text(json.dumps(data))
    upload(hub_url, "good/outer", place)
    with pytest.raises(NotTrusted, match="evil/tiny-scale: refused before running"):
        get_kernel("good/outer", trust_remote_code=["good/outer"], sources=stranger(shelf))
    assert not marker.exists()
    both = ["good/outer", "evil/tiny-scale"]
    module = get_kernel("good/outer", trust_remote_code=both, sources=stranger(shelf))
    assert loaded_from(module).repo_id == "good/outer"


@pytest.mark.parametrize("field", ["id", "kernel-depends"])
def test_forged_metadata_around_released_files_is_refused(shelf: Shelf, hub_url: str, tmp_path: Path, field: str):
    from pallas_hub.registry.build import build
    from pallas_hub.registry.record import record

    record("tiny-scale", shelf.sources)
    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    for metadata in place.glob("build/*/metadata.json"):
        forged = "json" if field == "id" else [{"repo-id": "evil/tiny-scale", "version": 1}]
        metadata.write_text(json.dumps({**json.loads(metadata.read_text()), field: forged}))
    upload(hub_url, REPO, place)
    with pytest.raises(PallasHubError, match=r"tampered with|evil/tiny-scale: no kernel repo"):
        get_kernel(REPO, sources=shelf.sources)
    assert json.loads("1") == 1  # the module whose name was claimed is still the real one


def test_a_tampered_cache_is_refused_before_any_code_runs(shelf: Shelf, hub_url: str, tmp_path: Path):
    shelf.publish()
    from pallas_hub.registry.verify import download

    variant = download(REPO, version=1) / "build/torch-cpu"
    wanted = hash_variant(variant)["op.py"]
    text = (variant / "op.py").read_text()
    (variant / "op.py").unlink()
    (variant / "op.py").write_text(text + f"\nopen({str(tmp_path / 'code-ran')!r}, 'a').close()\n")
    got = hash_variant(variant)["op.py"]
    with pytest.raises(DigestMismatch) as caught:
        get_kernel(REPO, sources=shelf.sources)
    assert f"op.py: wanted {wanted}, got {got}." in str(caught.value)
    assert f"pallas-hub download {REPO} --revision" in str(caught.value)
    assert not (tmp_path / "code-ran").exists()
    download(REPO, version=1, force=True)
    assert get_kernel(REPO, sources=shelf.sources).scale(torch.ones(1)).item() == 2.0


def test_a_cache_whose_digests_were_forged_too_is_a_strangers_kernel(shelf: Shelf, hub_url: str, tmp_path: Path):
    from pallas_hub.registry.verify import download

    shelf.publish()
    variant = download(REPO, version=1) / "build/torch-cpu"
    text, metadata = (variant / "op.py").read_text(), json.loads((variant / "metadata.json").read_text())
    for name in ("op.py", "metadata.json"):
        (variant / name).unlink()
    (variant / "op.py").write_text(text + f"\nopen({str(tmp_path / 'code-ran')!r}, 'a').close()\n")
    metadata["digest"]["files"] = hash_variant(variant)
    (variant / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(NotTrusted, match="it is not a build listed in hub_manifests"):
        get_kernel(REPO, sources=shelf.sources)
    assert not (tmp_path / "code-ran").exists()


def test_planted_files_are_refused(shelf: Shelf, hub_url: str):
    from pallas_hub.registry.verify import download

    shelf.publish()
    variant = download(REPO, version=1) / "build/torch-cpu"
    (variant / "torch.py").write_text("raise SystemExit\n")
    with pytest.raises(DigestMismatch, match=r"torch.py: not listed in metadata.json"):
        get_kernel(REPO, sources=shelf.sources)


@pytest.mark.parametrize("kind", ["a linked folder", "a pipe"])
def test_what_no_digest_can_cover_is_refused(shelf: Shelf, hub_url: str, tmp_path: Path, kind: str):
    from pallas_hub.registry.verify import download, verify

    shelf.publish()
    place = download(REPO, version=1) / "build/torch-cpu/odd"
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere") if kind == "a linked folder" else os.mkfifo(place)
    for check in (lambda: get_kernel(REPO, sources=shelf.sources), lambda: verify(place.parent, sources=shelf.sources)):
        with pytest.raises(DigestMismatch, match="odd: neither a file nor a folder of this kernel"):
            check()


def test_planted_bytecode_is_not_run(shelf: Shelf, hub_url: str, tmp_path: Path):
    import importlib.util
    import py_compile

    from pallas_hub.registry.verify import download

    shelf.publish()
    variant = download(REPO, version=1) / "build/torch-cpu"
    planted = tmp_path / "planted.py"
    planted.write_text(f"open({str(tmp_path / 'code-ran')!r}, 'a').close()\n")
    for name in ("__init__.py", "op.py", "late.py"):
        target = importlib.util.cache_from_source(str(variant / name))
        py_compile.compile(
            str(planted), target, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
    module = get_kernel(REPO, sources=shelf.sources)
    assert module.op.late() == "imported on first use"
    assert not (tmp_path / "code-ran").exists()


def test_a_file_that_changes_before_its_first_import_is_refused(shelf: Shelf, hub_url: str):
    shelf.publish()
    module = get_kernel(REPO, sources=shelf.sources)
    late = loaded_from(module).path / "late.py"
    late.unlink()
    late.write_text('ANSWER = "changed"\n')
    with pytest.raises(
        DigestMismatch, match=r"late.py: refused before running it: wanted .* got .*restart the program"
    ):
        module.op.late()


def test_a_repo_whose_files_do_not_match_its_metadata_is_refused(shelf: Shelf, hub_url: str, tmp_path: Path):
    from pallas_hub.registry.build import build

    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    (place / "build/torch-cpu/op.py").write_text("")
    upload(hub_url, REPO, place)
    with pytest.raises(DigestMismatch, match=r"op.py: wanted .* If that does not help, the repo itself is damaged"):
        get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))


def test_half_a_cache_is_not_loaded_offline(shelf: Shelf, hub_url: str, tmp_path: Path, monkeypatch):
    from pallas_hub.registry.verify import download

    shelf.publish()
    variant = download(REPO, version=1) / "build/torch-cpu"
    os.remove(os.path.realpath(variant / "op.py"))
    point_clients_at(hub_url, tmp_path / "hf", monkeypatch, offline=True)
    with pytest.raises(HubUnavailable, match=r"is only partly in the cache: .* lacks op.py"):
        get_kernel(REPO, sources=stranger(shelf))
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "bundled"


def test_has_kernel_asks_no_consent_and_runs_nothing(shelf: Shelf, hub_url: str, tmp_path: Path, monkeypatch):
    marker = with_marker(shelf, tmp_path)
    shelf.publish(org="somebody")
    assert has_kernel("somebody/tiny-scale", sources=stranger(shelf))
    assert not has_kernel("somebody/tiny-scale", version=9, sources=stranger(shelf))
    assert not has_kernel("somebody/other", sources=stranger(shelf))
    assert has_kernel(REPO, sources=shelf.sources)  # bundled
    assert not marker.exists()
    point_clients_at(CLOSED, tmp_path / "empty", monkeypatch)
    with pytest.raises(HubUnavailable, match="cannot be reached"):
        has_kernel("somebody/tiny-scale", sources=stranger(shelf))
    assert has_kernel(REPO, sources=shelf.sources)


def test_a_failed_import_leaves_nothing_behind_and_can_be_retried(shelf: Shelf, hub_url: str, monkeypatch):
    shelf.append(
        "__init__.py", "\nimport os\nif os.environ.get('TINY_SCALE_FAILS'):\n    raise RuntimeError('no luck')\n"
    )
    shelf.publish()
    monkeypatch.setenv("TINY_SCALE_FAILS", "1")
    before = set(sys.modules)
    with pytest.raises(RuntimeError, match="no luck"):
        get_kernel(REPO, sources=shelf.sources)
    assert not [name for name in set(sys.modules) - before if name.startswith("_tiny_scale")]
