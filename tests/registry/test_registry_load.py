"""get_kernel against a loopback Hub: hub, cache, offline, bundled; trust; tampering; refusals."""

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from registry_shelf import CLOSED, REPO, Shelf, point_clients_at, stranger, upload

from pallas_hub.registry.errors import (
    HubUnavailable,
    KernelsLibraryError,
    LoadError,
    NoMatchingVariant,
    NotTrusted,
    SourceError,
    UnknownKernel,
    UnknownVersion,
)
from pallas_hub.registry.load import get_kernel, has_kernel, load_source, loaded_from


def test_a_released_kernel_loads_from_the_hub_without_a_trust_flag(shelf: Shelf, hub_url: str, caplog):
    done = shelf.publish()
    with caplog.at_level(logging.INFO, "pallas_hub.registry"):
        module = get_kernel(REPO, sources=shelf.sources)
    assert torch.equal(module.scale(torch.ones(2), 3.0), torch.full((2,), 3.0))
    origin = loaded_from(module)
    assert (origin.repo_id, origin.version, origin.commit, origin.source) == (REPO, 1, done.commit, "hub")
    assert (origin.variant, origin.trust) == ("torch-cpu", "listed in hub_manifests (tiny-scale v1)")
    assert loaded_from(module.scale) == loaded_from(module.layers.Scale) == origin
    assert [record.getMessage() for record in caplog.records if record.name == "pallas_hub.registry"] == [str(origin)]
    assert str(origin).startswith(f"{REPO} v1 (torch-cpu, commit {done.commit[:12]}) loaded from hub: listed in")


def test_loading_works_with_telemetry_switched_off(shelf: Shelf, hub_url: str, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    shelf.publish()
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "hub"


def test_our_loader_and_the_kernels_library_share_one_module(shelf: Shelf, hub_url: str):
    import kernels

    shelf.publish()
    module = get_kernel(REPO, sources=shelf.sources)
    assert kernels.get_kernel(REPO, version=1, trust_remote_code=True) is module
    assert get_kernel(REPO, version=1, sources=shelf.sources) is module


def test_a_module_that_the_kernels_library_loaded_first_is_the_one_we_return(shelf: Shelf, hub_url: str):
    import kernels

    shelf.publish()
    theirs = kernels.get_kernel(REPO, version=1, trust_remote_code=True)
    assert get_kernel(REPO, sources=shelf.sources) is theirs
    assert loaded_from(theirs).source == "hub"


def test_the_newest_version_is_the_default_and_two_versions_live_side_by_side(shelf: Shelf, hub_url: str):
    shelf.publish()
    shelf.set_version(2)
    shelf.edit("torch-ext/tiny_scale/op.py", "factor: float = 2.0", "factor: float = 5.0")
    shelf.publish()
    second = get_kernel(REPO, sources=shelf.sources)
    first = get_kernel(REPO, version=1, sources=shelf.sources)
    x = torch.ones(1)
    assert (first.scale(x).item(), second.scale(x).item(), first.scale(x).item()) == (2.0, 5.0, 2.0)
    assert (loaded_from(first).version, loaded_from(second).version) == (1, 2)
    assert get_kernel(REPO, revision="v1", sources=shelf.sources) is first


def test_offline_after_one_online_load_works_for_us_and_for_the_kernels_library(shelf: Shelf, hub_url: str, tmp_path):
    shelf.publish()
    get_kernel(REPO, sources=shelf.sources)
    code = (
        "import sys; from pathlib import Path; import torch\n"
        "from pallas_hub.registry import get_kernel, loaded_from; from pallas_hub.registry.paths import "
        "Sources\n"
        "root = Path(sys.argv[1]); s = Sources(root / 'kernels', root / 'manifests', root / 'bridge')\n"
        "m = get_kernel('pallas-hub/tiny-scale', sources=s); print(loaded_from(m).source, "
        "m.scale(torch.ones(1)).item())\n"
        "import kernels\n"
        "assert kernels.get_kernel('pallas-hub/tiny-scale', version=1) is m\n"
        "assert kernels.has_kernel('pallas-hub/tiny-scale', version=1)\n"
    )
    repository = str(Path(__file__).parents[2])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": CLOSED, "PYTHONPATH": repository}
    command = [sys.executable, "-c", code, str(shelf.root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["cache", "2.0"], done.stderr


def test_a_hub_that_is_down_is_replaced_by_the_cache_then_by_the_bundled_copy(shelf, hub_url, tmp_path, monkeypatch):
    shelf.publish()
    get_kernel(REPO, sources=shelf.sources)
    shelf.append("op.py", "\n# the bundled copy is another build\n")
    point_clients_at(CLOSED, tmp_path / "hf", monkeypatch)
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).commit is not None
    point_clients_at(CLOSED, tmp_path / "empty", monkeypatch)
    module = get_kernel(REPO, sources=shelf.sources)
    origin = loaded_from(module)
    assert (origin.source, origin.commit, origin.trust) == ("bundled", None, "bundled with pallas_hub")
    assert module.scale(torch.ones(1)).item() == 2.0


@pytest.mark.parametrize("offline", [False, True])
def test_without_hub_cache_and_bundled_copy_the_error_names_all_three(shelf, tmp_path, monkeypatch, offline):
    point_clients_at(CLOSED, tmp_path / "empty", monkeypatch, offline=offline)
    words = "HF_HUB_OFFLINE=1, so only the cache" if offline else "the Hub at http://127.0.0.1:9 cannot be reached"
    with pytest.raises(HubUnavailable, match=rf"{words}.*\. {REPO} is not in the cache .*tiny-scale"):
        get_kernel(REPO, sources=stranger(shelf))


def test_a_repo_that_the_hub_lacks_is_bundled_or_unknown(shelf: Shelf, hub_url: str):
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "bundled"
    with pytest.raises(
        UnknownKernel, match=r"pallas-hub/nope: no kernel repo of that name on http://127.*hf auth login"
    ):
        get_kernel("pallas-hub/nope", sources=shelf.sources)
    with pytest.raises(UnknownKernel, match="no kernel repo of that name"):
        get_kernel("somebody/tiny-scale", sources=shelf.sources)  # the bundled copy is pallas-hub's, not somebody's
    with pytest.raises(UnknownKernel, match="no kernel repo of that name"):
        get_kernel(REPO, version=7, sources=shelf.sources)


def test_unknown_versions_and_revisions_list_what_exists(shelf: Shelf, hub_url: str):
    shelf.publish()
    with pytest.raises(UnknownVersion, match=rf"{REPO} has no version 3; versions on {hub_url}: v1\."):
        get_kernel(REPO, version=3, sources=shelf.sources)
    with pytest.raises(UnknownVersion, match=rf"{REPO} has no revision 'dev'; versions: v1\."):
        get_kernel(REPO, revision="dev", sources=shelf.sources)
    with pytest.raises(UnknownVersion, match="has no commit 0000"):
        get_kernel(REPO, revision="0" * 40, sources=shelf.sources)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"version": 1, "revision": "v1"}, UnknownVersion, "version or revision, not both; got version=1"),
        ({"version": "1"}, UnknownVersion, "version must be a whole number such as 1"),
        ({"version": True}, UnknownVersion, "version must be a whole number"),
        ({"version": 2**64}, UnknownVersion, "version must be a whole number"),
        ({"revision": ".."}, UnknownVersion, "revision must be a branch, tag or commit, as in 'v1'; got '..'"),
        ({"revision": ""}, UnknownVersion, "revision must be a branch, tag or commit"),
        ({"revision": 7}, UnknownVersion, "revision must be a branch, tag or commit"),
        ({"trust_remote_code": REPO}, NotTrusted, "must be False, True or a list of exact repo ids"),
        ({"trust_remote_code": ["pallas-hub"]}, SourceError, "repo id must be 'organisation/name'"),
        ({"trust_remote_code": ["pallas-hub/*"]}, SourceError, "repo id must be 'organisation/name'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict, error: type, words: str):
    with pytest.raises(error, match=words):
        get_kernel(REPO, **arguments)


@pytest.mark.parametrize(
    "repo_id", ["tiny-scale", "a/b/c", "", "../x", "a/..", None, "a/b.", "a/bü", "a/b--c", "a/b.git", f"a/{'b' * 97}"]
)
def test_malformed_repo_ids_are_refused(repo_id):
    with pytest.raises(SourceError, match="repo id must be 'organisation/name'"):
        get_kernel(repo_id)


def test_every_variant_is_listed_with_its_reason_when_none_fits(shelf: Shelf, hub_url: str):
    shelf.edit("build.toml", '["cpu", "cuda", "tpu"]', '["cuda", "tpu"]')
    shelf.publish()
    with pytest.raises(NoMatchingVariant) as caught:
        get_kernel(REPO, sources=shelf.sources)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{REPO} (commit ")
    assert "has no build for this machine (backend cpu, torch" in lines[0]
    assert lines[1].startswith("  torch-cuda  rejected: backend (cuda) does not match system backend (cpu)")
    assert lines[2].startswith("  torch-tpu   rejected: backend (tpu) does not match system backend (cpu)")
    assert lines[3].endswith(f"pallas-hub info {REPO}")
    assert not has_kernel(REPO, sources=stranger(shelf))


def test_a_build_for_a_torch_from_the_future_is_turned_down_in_words(shelf: Shelf, hub_url: str, tmp_path: Path):
    from pallas_hub.registry.build import build

    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    machine = os.uname().machine
    (place / "build/torch-cpu").rename(place / f"build/torch99-cxx11-cpu-{machine}-linux")
    shutil.rmtree(place / "build/torch-tpu")
    upload(hub_url, REPO, place)
    with pytest.raises(
        NoMatchingVariant, match=r"torch99-cxx11-cpu-\S+ +rejected: Torch version \(9.9\) does not match"
    ):
        get_kernel(REPO, sources=stranger(shelf))


def test_a_backend_that_this_machine_lacks_is_refused(shelf: Shelf, hub_url: str):
    shelf.publish()
    with pytest.raises(NoMatchingVariant, match=r"Invalid backend 'tpu'.*Variants in commit .*: torch-cpu, torch-cuda"):
        get_kernel(REPO, backend="tpu", sources=shelf.sources)


def test_a_branch_that_holds_another_version_is_refused(shelf: Shelf, hub_url: str, tmp_path: Path):
    from pallas_hub.registry.build import build

    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    upload(hub_url, REPO, place, branch="v2")
    with pytest.raises(LoadError, match=r"v2 \(commit \w+\) holds a build of version 1"):
        get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (
            lambda build: (build / "torch-cpu/metadata.json").unlink(),
            NoMatchingVariant,
            "holds no metadata.json in its",
        ),
        (lambda build: build.rename(build.with_name("built")), NoMatchingVariant, "holds no build/ folder"),
        (
            lambda build: (build / "torch-cpu/metadata.json").write_text("{"),
            LoadError,
            f"{REPO}: .*metadata|{REPO}: .*EOF",
        ),
    ],
)
def test_repos_that_are_no_kernels_are_refused_in_words(shelf, hub_url, tmp_path, damage, error, words):
    from pallas_hub.registry.build import build

    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    damage(place / "build")
    upload(hub_url, REPO, place)
    with pytest.raises(error, match=words):
        get_kernel(REPO, trust_remote_code=True, sources=stranger(shelf))


def test_a_missing_name_is_reported_at_load_with_the_names_that_exist(shelf: Shelf, hub_url: str):
    shelf.publish()
    with pytest.raises(LoadError, match=r"does not export scale_rows; it exports layers, scale\."):
        get_kernel(REPO, names=["scale", "scale_rows"], sources=shelf.sources)
    with pytest.raises(LoadError, match="names must be a list of names"):
        get_kernel(REPO, names="scale", sources=shelf.sources)
    get_kernel(REPO, names=["scale"], sources=shelf.sources)


def test_loading_inside_a_compiled_function_is_refused(shelf: Shelf, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(LoadError, match="called inside a compiled function; load the kernel before compiling"):
        get_kernel(REPO, sources=shelf.sources)


@pytest.mark.parametrize("version", [None, "0.16.9", "0.18.0"])
def test_without_a_supported_kernels_library_the_bundled_copy_loads(shelf: Shelf, monkeypatch, version):
    import importlib.metadata

    real = importlib.metadata.version

    def fake(name: str) -> str:
        if name != "kernels":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "bundled"
    found = "is not installed" if version is None else f"kernels {version} is installed"
    with pytest.raises(KernelsLibraryError, match=rf"{found}.*pip install \"kernels>=0.17.2,<0.18\""):
        get_kernel("somebody/else", sources=shelf.sources)
    with pytest.raises(ImportError, match=found):
        get_kernel("somebody/else", sources=shelf.sources)


def test_a_module_that_only_looks_like_the_kernels_library_is_named(shelf: Shelf, monkeypatch):
    import kernels

    monkeypatch.setitem(sys.modules, "kernels.deps", None)
    monkeypatch.delattr(kernels, "deps")
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "bundled"
    with pytest.raises(
        KernelsLibraryError,
        match=r"is installed but cannot be used .*'kernels' is .*; no other module may be called so",
    ):
        get_kernel("somebody/else", sources=shelf.sources)


@pytest.mark.parametrize("url", ["localhost:8787", "ftp://hub"])
def test_an_endpoint_that_is_no_url_is_named(shelf: Shelf, tmp_path: Path, monkeypatch, url: str):
    point_clients_at(url, tmp_path / "hf", monkeypatch)
    with pytest.raises(LoadError, match=f"cannot ask {url}: .*HF_ENDPOINT must be a URL"):
        get_kernel(REPO, sources=shelf.sources)


def test_the_bundled_copy_works_with_a_cache_that_cannot_be_written(shelf: Shelf, hub_url: str, tmp_path, monkeypatch):
    blocker = tmp_path / "a-file"
    blocker.write_text("")
    monkeypatch.setenv("PALLAS_HUB_CACHE", str(blocker / "cache"))
    origin = loaded_from(get_kernel(REPO, sources=shelf.sources))
    assert origin.source == "bundled"
    assert not origin.path.is_relative_to(tmp_path)


def test_load_source_follows_every_edit_and_is_fast_when_warm(shelf: Shelf):
    from time import perf_counter

    first = load_source("tiny-scale", sources=shelf.sources)
    assert load_source("tiny-scale", sources=shelf.sources) is first
    shelf.edit("torch-ext/tiny_scale/op.py", "factor: float = 2.0", "factor: float = 4.0")
    second = load_source("tiny-scale", sources=shelf.sources)
    assert (first.scale(torch.ones(1)).item(), second.scale(torch.ones(1)).item()) == (2.0, 4.0)
    times = []
    for _ in range(5):
        start = perf_counter()
        load_source("tiny-scale", sources=shelf.sources)
        times.append(perf_counter() - start)
    assert min(times) < 0.05


def test_load_source_repairs_a_damaged_build_cache(shelf: Shelf):
    from pallas_hub.registry.local import ensure_built
    from pallas_hub.registry.source import read_source

    place = ensure_built(read_source("tiny-scale", shelf.sources))
    (place / "build/torch-cpu/op.py").write_text("raise SystemExit")
    assert load_source("tiny-scale", sources=shelf.sources).scale(torch.ones(1)).item() == 2.0


def test_a_source_build_and_the_hub_copy_of_the_same_kernel_coexist(shelf: Shelf, hub_url: str):
    import kernels

    shelf.publish()
    ours = load_source("tiny-scale", sources=shelf.sources)
    theirs = kernels.get_kernel(REPO, version=1, trust_remote_code=True)
    assert ours is not theirs
    assert ours.scale(torch.ones(1)).item() == theirs.scale(torch.ones(1)).item() == 2.0


def test_the_same_files_in_another_commit_are_not_run_twice(shelf: Shelf, hub_url: str):
    shelf.publish()
    first = get_kernel(REPO, sources=shelf.sources)
    shelf.edit("CARD.md", "# {{ name }}", "# {{ name }}, the kernel")
    assert shelf.publish().changed == ["README.md"]
    assert get_kernel(REPO, sources=shelf.sources) is first


def test_local_kernels_overrides_as_in_the_kernels_library(shelf: Shelf, hub_url: str, tmp_path: Path, monkeypatch):
    from kernels.load import _parse_local_kernel_overrides

    from pallas_hub.registry.build import build

    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    shelf.publish()
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={place}")
    _parse_local_kernel_overrides.cache_clear()
    origin = loaded_from(get_kernel(REPO, version=1, sources=stranger(shelf)))
    assert (origin.source, origin.trust) == ("local", "LOCAL_KERNELS names this folder")
    assert origin.path == place / "build/torch-cpu"


def test_importing_the_package_opens_no_socket_and_imports_nothing_heavy():
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('socket')\n"
        "socket.socket.connect = refuse\n"
        "import pallas_hub, pallas_hub.registry\n"
        "print([m for m in ('jax', 'torch', 'transformers', 'kernels', 'huggingface_hub') if m in "
        "sys.modules])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loaded_from_refuses_what_is_not_ours():
    with pytest.raises(LoadError, match=r"json: not a kernel loaded by pallas_hub. Loaded:"):
        loaded_from(json)


def test_records_are_immutable(shelf: Shelf):
    origin = loaded_from(load_source("tiny-scale", sources=shelf.sources))
    with pytest.raises(dataclasses.FrozenInstanceError):
        origin.trust = "mine"
