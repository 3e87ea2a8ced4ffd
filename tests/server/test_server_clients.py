"""The kernels library against the server, in processes of its own: publish, load, inspect, lock, benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from server_tools import OP, client_env, run_python, write_kernel_repo

from pallas_hub.registry.server import Hub, running_hub

KERNEL = {"repo_type": "kernel"}
KERNELS = str(Path(sys.executable).with_name("kernels"))

LOAD = """
import json, pathlib, torch, kernels
from huggingface_hub.errors import RepositoryNotFoundError

def error(call):
    try:
        call()
    except Exception as e:
        return [type(e).__name__, str(e)]

x = torch.arange(3.0)
name = "pallas-hub/tiny-kernel"
one, two = (kernels.get_kernel(name, version=v) for v in (1, 2))
by_branch = kernels.get_kernel(name, revision="v1")
other = kernels.get_kernel("acme/tiny-kernel", version=1, trust_remote_code=True)
print(json.dumps({
    "one": one.double(x).tolist(),
    "two": two.double(x).tolist(),
    "one again": one.double(x).tolist(),
    "by branch": by_branch.__name__ == one.__name__,
    "other": other.double(x).tolist(),
    "has": [kernels.has_kernel(name, version=1), kernels.has_kernel("pallas-hub/no-build", version=1)],
    "untrusted": error(lambda: kernels.get_kernel("acme/tiny-kernel", version=1)),
    "no version": error(lambda: kernels.get_kernel(name, version=7)),
    "no repo": error(lambda: kernels.get_kernel("pallas-hub/nope", version=1)),
}))
"""
OFFLINE = """
import json, torch, kernels
print(json.dumps(kernels.get_kernel("pallas-hub/tiny-kernel", version=1).double(torch.arange(3.0)).tolist()))
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A server with pallas-hub/tiny-kernel (v1 and v2), an untrusted copy of it, and a repo without a build."""
    folder = tmp_path_factory.mktemp("published")
    with running_hub(folder / "store") as hub:
        api = HfApi(endpoint=hub.url, token=False)
        first = write_kernel_repo(folder / "v1")
        second = write_kernel_repo(folder / "v2", version=2, op=OP.replace("2 * x", "2 * x + 0.5"))
        for repo, branch, source in (
            ("pallas-hub/tiny-kernel", "v1", first),
            ("pallas-hub/tiny-kernel", "v2", second),
            ("acme/tiny-kernel", "v1", first),
        ):
            api.create_repo(repo, exist_ok=True, **KERNEL)
            api.create_branch(repo, branch=branch, **KERNEL)
            api.upload_folder(repo_id=repo, folder_path=source, revision=branch, **KERNEL)
        api.create_repo("pallas-hub/no-build", **KERNEL)
        api.create_branch("pallas-hub/no-build", branch="v1", **KERNEL)
        no_build = [(folder / "v1" / "build" / "torch-cpu" / "op.py", "build/torch-cuda/__init__.py")]
        for path, target in no_build:
            api.upload_file(
                path_or_fileobj=path, path_in_repo=target, repo_id="pallas-hub/no-build", revision="v1", **KERNEL
            )
        yield hub


def test_kernels_loads_versions_side_by_side_and_tells_failures_apart(published: Hub, tmp_path: Path) -> None:
    result = run_python(LOAD, client_env(tmp_path, published.url))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["one"] == found["one again"] == found["other"] == [0.0, 2.0, 4.0]
    assert found["two"] == [0.5, 2.5, 4.5]
    assert found["by branch"] is True
    assert found["has"] == [True, False]
    assert found["untrusted"][0] == "ValueError"
    assert "'acme/tiny-kernel' is not from a trusted publisher" in found["untrusted"][1]
    assert found["no version"] == ["ValueError", "Version 7 not found, available versions: 1, 2"]
    assert found["no repo"][0] == "RepositoryNotFoundError"
    assert "repository pallas-hub/nope does not exist on this server" in found["no repo"][1]


def test_a_whole_download_serves_offline(published: Hub, tmp_path: Path) -> None:
    env = client_env(tmp_path, published.url)
    fetch = "snapshot_download('pallas-hub/tiny-kernel', repo_type='kernel', revision='v1')"
    code = f"from huggingface_hub import snapshot_download; {fetch}"
    assert run_python(code, env).returncode == 0
    result = run_python(OFFLINE, client_env(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1"))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [0.0, 2.0, 4.0]


# The commands in one process: starting Python and importing torch takes longer than all of them together.
COMMANDS = """
import contextlib, io, json, sys
from kernels.cli import main

printed = []
for line in json.loads(sys.argv[1]):
    sys.argv = ["kernels", *line]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main()
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def test_kernels_versions_info_lock_and_download(published: Hub, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"pallas-hub/tiny-kernel" = 1\n')
    lines = [
        ["versions", "pallas-hub/tiny-kernel"],
        ["info", "pallas-hub/tiny-kernel", "--json"],
        ["lock", str(project)],
        ["download", str(project)],
    ]
    result = run_python(COMMANDS, client_env(tmp_path, published.url), json.dumps(lines))
    assert result.returncode == 0, result.stderr
    versions, info, _, _ = json.loads(result.stdout)
    for version in ("1", "2"):
        assert version in versions

    about = json.loads(info)
    assert (about["name"], about["version"], about["revision"]) == ("tiny-kernel", 2, "v2")
    assert about["backends"] == ["cpu"]

    head = HfApi(endpoint=published.url).kernel_info("pallas-hub/tiny-kernel", revision="v1").sha
    assert head in (project / "kernels.lock").read_text()
    assert len(list(tmp_path.rglob(f"snapshots/{head}/build/torch-cpu/op.py"))) == 1


def test_kernels_benchmark_finds_the_repo_as_a_model(published: Hub, tmp_path: Path) -> None:
    pytest.importorskip("tabulate", reason="kernels benchmark needs tabulate")
    env = client_env(tmp_path, published.url)
    out = tmp_path / "result.json"
    args = ["--version", "1", "--iterations", "3", "--warmup", "1", "--output", str(out)]
    command = [KERNELS, "benchmark", "pallas-hub/tiny-kernel", *args]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr + result.stdout
    (entry,) = json.loads(out.read_text())["results"]
    assert entry["workload"].endswith("small")
    assert entry["verified"] is True
    assert entry["timingResults"]["iterations"] == 3
