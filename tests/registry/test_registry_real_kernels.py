"""The kernels of this repository, all the way: built, published to a loopback Hub, loaded by both loaders."""

import dataclasses
import shutil
from pathlib import Path

import kernels
import pytest
import torch

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
    shutil.copytree(OUR_SOURCES.kernels, shelf, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for init in shelf.glob("*/torch-ext/*/__init__.py"):
        init.write_text(f"{init.read_text()}\n# {tmp_path}\n")
    return dataclasses.replace(OUR_SOURCES, kernels=shelf, manifests=tmp_path / "manifests")


def tree(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_there_are_kernels():
    assert {"moe-experts", "ragged-dot", "rms-norm"} <= set(NAMES)


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


def test_a_vendored_kernel_works_in_a_published_build(sources: Sources, hub_url: str):
    """moe-experts holds ragged-dot and two copies of the bridge, and ragged-dot itself may be loaded next to it."""
    for name in ("moe-experts", "ragged-dot"):
        record(name, sources)
        publish(name, sources=sources)
    module = kernels.get_kernel("pallas-hub/moe-experts", version=1)
    alone = kernels.get_kernel("pallas-hub/ragged-dot", version=1)
    torch.manual_seed(0)
    layer = (torch.randn(3, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6), torch.tensor([[0, 3], [1, 4], [3, 3]]))
    arguments = (*(x.requires_grad_() if x.is_floating_point() else x for x in layer), torch.rand(3, 2))
    wanted = alone.moe_experts(*arguments)
    for path in ("torch", "interpret"):
        with module._bridge.use_path(path), module._bridge.record_paths() as ran:
            torch.testing.assert_close(module.moe_experts(*arguments), wanted, rtol=1e-4, atol=1e-5)
        assert ran == [(f"{module.__name__}__ragged_dot::ragged_dot", path)] * 2
    with module._bridge.use_path("interpret"), alone._bridge.record_paths() as ran, torch.no_grad():
        torch.testing.assert_close(module.moe_experts(*arguments), wanted.detach(), rtol=1e-4, atol=1e-5)
    assert ran == [(f"{module.__name__}::moe_experts", "interpret")]
    assert loaded_from(get_kernel("pallas-hub/moe-experts", sources=sources)).source == "hub"


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
