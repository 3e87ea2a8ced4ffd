"""`kernels benchmark`, the real one, on the published kernels: it finds our workloads and verifies all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_hub.registry.paths import Sources
from pallas_hub.registry.publish import publish
from pallas_hub.registry.record import record
from pallas_hub.registry.server import running_hub

KERNELS = ["rms-norm", "ragged-dot"]
COMMAND = Path(sys.executable).parent / "kernels"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A loopback Hub that holds both kernels as they are now, recorded in manifests of this test's own."""
    sources = Sources(manifests=tmp_path_factory.mktemp("manifests"))
    with running_hub(tmp_path_factory.mktemp("store"), trusted=("pallas-hub",)) as running:
        for name in KERNELS:
            record(name, sources)
            publish(name, "pallas-hub", endpoint=running.url, token="test", sources=sources)
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_benchmark_runs_and_verifies_every_workload(hub, name, tmp_path):
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    environ.pop("HF_HUB_OFFLINE", None)
    environ.pop("HF_HUB_DISABLE_TELEMETRY", None)  # with it, kernels 0.17.2 sends a header that is refused
    command = [str(COMMAND), "benchmark", f"pallas-hub/{name}", "--version", "1", "--iterations", "3", "--warmup", "1"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out.json")], capture_output=True, text=True, env=environ, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results
    for result in results:
        assert result["verified"] is True, result["workload"]
        assert result["timingResults"]["iterations"] == 3
        assert result["timingResults"]["mean_ms"] > 0
