"""The kernels of this repository, all the way: built, published to a loopback Hub, loaded by both loaders."""

import dataclasses
import shutil
from pathlib import Path

import kernels
import pytest

from pallas_hub.registry.build import build
from pallas_hub.registry.load import get_kernel, load_source, loaded_from
from pallas_hub.registry.manifest import read_manifest
from pallas_hub.registry.paths import OUR_SOURCES, Sources
from pallas_hub.registry.publish import publish
from pallas_hub.registry.record import record

NAMES = OUR_SOURCES.names()


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """A copy of the real kernels with manifests of its own: what the working tree builds now, recorded or not.

    A line of its own makes its content unique: equal content is one module per process, with the origin it had first.
    """
    shelf = tmp_path / "kernels"
    shutil.copytree(OUR_SOURCES.kernels, shelf, ignore=shutil.ignore_patterns("__pycache__"))
    for init in shelf.glob("*/torch-ext/*/__init__.py"):
        init.write_text(f"{init.read_text()}\n# {tmp_path}\n")
    return dataclasses.replace(OUR_SOURCES, kernels=shelf, manifests=tmp_path / "manifests")


def tree(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_there_are_kernels():
    assert {"ragged-dot", "rms-norm"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_publish_then_load_is_identity(name: str, sources: Sources, hub_url: str, tmp_path: Path):
    record(name, sources)
    built = build(name, tmp_path / "out", sources=sources)
    done = publish(name, sources=sources)
    repo_id = read_manifest(name, sources).repo_id
    module = get_kernel(repo_id, sources=sources)
    origin = loaded_from(module)
    assert (origin.commit, origin.source, origin.version) == (done.commit, "hub", built.version)
    assert tree(origin.path) == tree(built.path / "build" / origin.variant)
    assert kernels.get_kernel(repo_id, version=built.version) is module
    assert sorted(module.__all__) == sorted(built.api.names)
    assert all(hasattr(module, public) for public in built.api.names)
    assert sorted(built.api.layers) == sorted(
        public
        for public, value in vars(module.layers).items()
        if public in built.api.layers and isinstance(value, type)
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_source_build_has_the_recorded_names(name: str, sources: Sources):
    module = load_source(name, sources=sources)
    assert loaded_from(module).source == "source"
    assert sorted(module.__all__) == sorted(record(name, sources).versions[loaded_from(module).version].api.names)


@pytest.mark.parametrize("name", NAMES)
def test_the_official_builder_accepts_build_toml(name: str):
    from kernels._rust import Build

    backends = [str(backend).lower() for backend in Build.open(OUR_SOURCES.folder(name)).general.backends]
    assert sorted(backends) == ["cpu", "cuda", "tpu"]
