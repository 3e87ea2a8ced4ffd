"""git itself against the server: the content is plain git."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from server_tools import fsck, post_commit, request, write_kernel_repo

from pallas_hub.registry.server import Hub

KERNEL = {"repo_type": "kernel"}


def git(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": "/usr/bin:/bin:/usr/local/bin"}
    return subprocess.run(["git", *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def published(api: HfApi, repo: str, tmp_path: Path) -> Path:
    """The folder that was uploaded to v1 of the repo."""
    folder = write_kernel_repo(tmp_path / "kernel")
    (folder / "noise.bin").write_bytes(random.Random(0).randbytes(300_000))  # more than one line of the protocol
    api.upload_folder(repo_id=repo, folder_path=folder, revision="v1", **KERNEL)
    return folder


@pytest.mark.parametrize("path", ["kernels/acme/tiny-kernel", "kernels/acme/tiny-kernel.git", "acme/tiny-kernel"])
@pytest.mark.parametrize("depth", [[], ["--depth", "1"]])
def test_clone_gives_the_uploaded_files(hub: Hub, published: Path, tmp_path: Path, path: str, depth: list[str]) -> None:
    result = git("clone", *depth, "--branch", "v1", f"{hub.url}/{path}", str(tmp_path / "clone"))
    assert result.returncode == 0, result.stderr
    for source in published.rglob("*"):
        if source.is_file():
            assert (tmp_path / "clone" / source.relative_to(published)).read_bytes() == source.read_bytes()
    assert git("fsck", "--full", "--strict", cwd=tmp_path / "clone").returncode == 0
    assert len(git("log", "--format=%H", cwd=tmp_path / "clone").stdout.split()) == (1 if depth else 2)


def test_the_store_holds_sound_repositories(hub: Hub, published: Path) -> None:
    assert fsck(hub.store / "acme/tiny-kernel.git") == ""


def test_fetch_brings_what_is_new(hub: Hub, api: HfApi, published: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git("clone", "--branch", "v1", f"{hub.url}/kernels/acme/tiny-kernel", str(clone))
    for i in range(40):  # many haves: git compresses its request
        post_commit(hub.url, "acme/tiny-kernel", "v1", {"n": b"%d" % i})
    api.create_tag("acme/tiny-kernel", tag="release", revision="v1", tag_message="note", **KERNEL)
    result = git("pull", "--ff-only", "--tags", cwd=clone)
    assert result.returncode == 0, result.stderr
    assert (clone / "n").read_bytes() == b"39"
    for i in range(40):
        git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--allow-empty", "-m", f"{i}", cwd=clone)
    post_commit(hub.url, "acme/tiny-kernel", "v1", {"n": b"new"})
    result = git("fetch", cwd=clone)
    assert result.returncode == 0, result.stderr
    head = api.kernel_info("acme/tiny-kernel", revision="v1").sha
    assert git("rev-parse", "origin/v1", cwd=clone).stdout.strip() == head


def test_ls_remote_lists_refs_and_peeled_tags(hub: Hub, api: HfApi, published: Path) -> None:
    api.create_tag("acme/tiny-kernel", tag="release", revision="v1", tag_message="note", **KERNEL)
    result = git("ls-remote", f"{hub.url}/kernels/acme/tiny-kernel")
    sha = api.kernel_info("acme/tiny-kernel", revision="v1").sha
    lines = dict(reversed(line.split("\t")) for line in result.stdout.splitlines())
    assert lines["refs/heads/v1"] == lines["refs/tags/release^{}"] == sha
    assert lines["HEAD"] == lines["refs/heads/main"]


def test_push_is_refused_in_words(hub: Hub, published: Path, tmp_path: Path) -> None:
    git("clone", "--branch", "v1", f"{hub.url}/kernels/acme/tiny-kernel", str(tmp_path / "clone"))
    result = git("push", "origin", "v1:v2", cwd=tmp_path / "clone")
    assert result.returncode != 0
    status, headers, _ = request("GET", f"{hub.url}/kernels/acme/tiny-kernel/info/refs?service=git-receive-pack")
    assert status == 403
    assert headers["X-Error-Message"] == (
        "git push is not served; upload with huggingface_hub or `pallas-hub publish`."
    )


def test_clone_of_a_missing_repo_fails(hub: Hub, tmp_path: Path) -> None:
    result = git("clone", f"{hub.url}/kernels/acme/nope", str(tmp_path / "clone"))
    assert "repository acme/nope does not exist on this server" in result.stderr or "not found" in result.stderr
    assert result.returncode != 0


@pytest.mark.parametrize(
    ("body", "headers", "status", "problem"),
    [
        (b"garbage", {}, 400, "not a valid git-upload-pack request"),
        (b"0032want " + b"a" * 40 + b"\n", {}, 400, "not a valid git-upload-pack request"),
        (b"not gzip", {"Content-Encoding": "gzip"}, 400, "is not valid gzip"),
        (bytes(17 * 2**20), {}, 413, "larger than 16777216 bytes"),
    ],
)
def test_bad_git_requests_are_refused(
    hub: Hub, published: Path, body: bytes, headers: dict[str, str], status: int, problem: str
) -> None:
    url = f"{hub.url}/kernels/acme/tiny-kernel/git-upload-pack"
    found, answer, _ = request("POST", url, body, headers)
    assert (found, problem in answer["X-Error-Message"]) == (status, True), answer["X-Error-Message"]
