"""Many loads at once on an empty cache, locks that do nothing, and a process killed in the middle of a download."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from registry_shelf import Shelf

REPO = "pallas-hub/tiny-scale"

# One process imports everything, then forks: eight imports of torch at once would measure the imports.
PRELUDE = """
import hashlib, os, signal, sys, threading
from pathlib import Path
import kernels.load, kernels.deps, torch, huggingface_hub.file_download as fd
from pallas_hub.registry import get_kernel, loaded_from
from pallas_hub.registry.paths import Sources

root = Path(sys.argv[1])
shelf = Sources(root / "kernels", root / "manifests", root / "bridge")

def load():
    module = get_kernel("pallas-hub/tiny-scale", sources=shelf)
    assert module.scale(torch.ones(1)).item() == 2.0
    origin = loaded_from(module)
    assert origin.source == "hub", origin
    return hashlib.sha256((origin.path / "table.json").read_bytes()).hexdigest()
"""
PROCESSES = (
    PRELUDE
    + """
if sys.argv[2] == "no locks":
    import fcntl
    fcntl.flock = lambda *arguments: None
children = []
for number in range(8):
    child = os.fork()
    if child == 0:
        try:
            os.write(1, f"{load()}\\n".encode())
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    children.append(child)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""
)
THREADS = (
    PRELUDE
    + """
start = threading.Barrier(8)
def work():
    start.wait()
    os.write(1, f"{load()}\\n".encode())
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
)
KILLED = (
    PRELUDE
    + """
real = fd.http_get
def http_get(url, temp_file, **options):
    write = temp_file.write
    def dying(data):
        write(data[: len(data) // 2])
        temp_file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if "table.json" in url:
        temp_file.write = dying
    return real(url, temp_file, **options)
fd.http_get = http_get
load()
"""
)
RETRY = PRELUDE + "print(load())"


@pytest.fixture
def table(shelf: Shelf, hub_url: str) -> str:
    """Publish a kernel with a 5 MB file; its sha256."""
    data = b"[" + b"0.123456789," * 436_000 + b"0]"
    shelf.edit("build.toml", '["cpu", "cuda", "tpu"]', '["cpu"]')
    (shelf.package() / "table.json").write_bytes(data)
    shelf.publish()
    return hashlib.sha256(data).hexdigest()


def run(code: str, shelf: Shelf, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, str(shelf.root), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_eight_processes_on_an_empty_cache_see_whole_files(shelf: Shelf, table: str, locks: str):
    done = run(PROCESSES, shelf, locks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [table] * 8


def test_eight_processes_build_the_same_sources_at_once(shelf: Shelf):
    code = PROCESSES.replace("{load()}", "{load_source('tiny-scale', sources=shelf).scale(torch.ones(1)).item()}")
    done = run(code.replace("import get_kernel,", "import load_source, get_kernel,"), shelf, "locks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0"] * 8


def test_eight_threads_on_an_empty_cache_see_whole_files_and_one_module(shelf: Shelf, table: str):
    done = run(THREADS, shelf)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [table] * 8, done.stderr


def test_after_a_kill_in_the_middle_of_a_download_the_retry_works(shelf: Shelf, table: str, tmp_path: Path):
    assert run(KILLED, shelf).returncode == -signal.SIGKILL
    cached = [path for path in (tmp_path / "hf/hub").rglob("table.json") if path.exists()]
    assert cached == [], "a half file is visible under its name"
    assert any(path.stat().st_size for path in (tmp_path / "hf/hub").rglob("*.incomplete")), "nothing was written"
    done = run(RETRY, shelf)
    assert done.stdout.split() == [table], done.stderr
