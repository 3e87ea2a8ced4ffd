"""What several server tests need: a tiny kernel repo, a server in a process of its own, raw requests."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVE = (
    "import argparse, sys; from pallas_hub.cli import serve; p = argparse.ArgumentParser(prog='pallas-hub'); "
    "serve.add_parser(p.add_subparsers()); sys.exit(serve.run(p.parse_args()))"
)

OP = """\
import torch


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
"""
BENCHMARK = """\
import torch
from kernels.benchmark import Benchmark


class DoubleBenchmark(Benchmark):
    seed = 0

    def setup_small(self):
        self.x = torch.arange(8.0)
        self.out = torch.empty(8)

    def benchmark_small(self):
        self.out = self.kernel.double(self.x)

    def verify_small(self):
        return self.x + self.x
"""


def write_kernel_repo(folder: Path, *, version: int = 1, op: str = OP) -> Path:
    """A kernel repo as the builder would lay it out, with one variant that computes 2 * x."""
    variant = folder / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "op.py").write_text(op)
    (variant / "__init__.py").write_text("from .op import double\n\n__all__ = ['double']\n")
    files = {
        path.name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(variant.iterdir())
    }
    metadata = {
        "name": "tiny-kernel",
        "id": f"_tiny_kernel_cpu_v{version}_{hashlib.sha256(op.encode()).hexdigest()[:7]}",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "benchmark_double.py").write_text(BENCHMARK)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [kernel]\n---\n# tiny\n")
    return folder


def client_env(cache: Path, url: str, **more: str) -> dict[str, str]:
    """The environment of a client process: this Hub, a cache of its own, nothing of the user's."""
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "KERNELS_", "HUGGING"))}
    return {
        **keep,
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "JAX_PLATFORMS": "cpu",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": str(ROOT),
        **more,
    }


def run_python(code: str, env: Mapping[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=dict(env), capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def start_serve(store: Path, *options: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", "--store", str(store), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        cwd=ROOT,
    )


@contextmanager
def serving(store: Path, *options: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """`pallas-hub serve` in a process of its own; yields the process and the URL it printed."""
    process = start_serve(store, "--port", "0", *options)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving http"), line + process.stderr.read()
        yield process, line.split()[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def request(
    method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body, for errors too; without the clients' own checks and retries."""
    message = urllib.request.Request(url, data=body, method=method, headers=dict(headers or {}))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(message, timeout=30) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def post_json(url: str, value: object, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    return request("POST", url, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


def commit_lines(files: Mapping[str, bytes], *, deleted: Sequence[str] = (), parent: str | None = None) -> bytes:
    """The body of a commit request."""
    header: dict[str, object] = {"summary": "test", "description": ""}
    if parent is not None:
        header["parentCommit"] = parent
    items: list[dict[str, object]] = [{"key": "header", "value": header}]
    for path, content in files.items():
        value = {"path": path, "content": base64.b64encode(content).decode(), "encoding": "base64"}
        items.append({"key": "file", "value": value})
    items += [{"key": "deletedFile", "value": {"path": path}} for path in deleted]
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def post_commit(
    url: str, repo_id: str, branch: str, files: Mapping[str, bytes], **options: object
) -> tuple[int, Mapping[str, str], bytes]:
    body = commit_lines(files, **options)  # type: ignore[arg-type]
    return request("POST", f"{url}/api/kernels/{repo_id}/commit/{branch}", body)


def fsck(repo: Path) -> str:
    """What `git fsck` finds wrong; unreachable objects are not wrong."""
    result = subprocess.run(
        ["git", "fsck", "--full", "--strict", "--no-dangling"], cwd=repo, capture_output=True, text=True
    )
    return result.stdout + result.stderr + ("" if result.returncode == 0 else f"exit code {result.returncode}")
