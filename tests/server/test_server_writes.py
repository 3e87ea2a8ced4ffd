"""What must hold whatever happens: a branch is at the old version or at the new one, complete, and stays usable."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dulwich.refs import DiskRefsContainer
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from server_tools import client_env, commit_lines, fsck, post_commit, request, run_python, serving

from pallas_hub.registry.server import Hub, Store, objects, running_hub

KERNEL = {"repo_type": "kernel"}


def head(api: HfApi, repo: str, branch: str = "v1") -> str:
    sha = api.kernel_info(repo, revision=branch).sha
    assert sha is not None
    return sha


def read(hub_url: str, repo: str, path: str, branch: str = "v1") -> bytes:
    status, _, body = request("GET", f"{hub_url}/kernels/{repo}/resolve/{branch}/{path}")
    assert status == 200, body
    return body


def oid(answer: tuple[int, object, bytes]) -> str:
    assert answer[0] == 200, answer
    return json.loads(answer[2])["commitOid"]


def test_eight_threads_commit_to_one_branch(hub: Hub, api: HfApi, repo: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda i: post_commit(hub.url, repo, "v1", {f"file{i}": b"%d" % i, "last": b"%d" % i}), range(8))
        )
    shas = [oid(answer) for answer in answers]
    history = [commit.commit_id for commit in api.list_repo_commits(repo, revision="v1", **KERNEL)]
    assert len(set(shas)) == 8
    assert sorted(history[:-1]) == sorted(shas)
    assert sorted(api.list_repo_files(repo, revision="v1", **KERNEL)) == [f"file{i}" for i in range(8)] + ["last"]
    assert read(hub.url, repo, "last") == b"%d" % shas.index(history[0])
    assert fsck(hub.store / f"{repo}.git") == ""


def test_eight_threads_commit_to_eight_branches_and_repos(hub: Hub, api: HfApi, repo: str) -> None:
    def work(i: int) -> None:
        own = f"acme/k{i}"
        api.create_repo(own, **KERNEL)
        for target, branch in ((repo, f"dev/{i}"), (own, "v1")):
            api.create_branch(target, branch=branch, **KERNEL)
            for n in range(2):
                oid(post_commit(hub.url, target, branch.replace("/", "%2F"), {"me": b"%d.%d" % (i, n)}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    for i in range(8):
        assert read(hub.url, repo, "me", f"dev%2F{i}") == b"%d.1" % i
        assert read(hub.url, f"acme/k{i}", "me") == b"%d.1" % i
    assert len(api.list_repo_refs(repo, **KERNEL).branches) == 10
    assert fsck(hub.store / f"{repo}.git") == ""


def test_of_eight_commits_with_one_parent_one_succeeds(hub: Hub, api: HfApi, repo: str) -> None:
    parent = head(api, repo)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: post_commit(hub.url, repo, "v1", {"a": b"%d" % i}, parent=parent), range(8)))
    assert sorted(status for status, _, _ in answers) == [200] + [412] * 7
    assert len(api.list_repo_commits(repo, revision="v1", **KERNEL)) == 2


def test_of_eight_creations_of_one_repo_one_succeeds(api: HfApi) -> None:
    def create(_: int) -> bool:
        try:
            api.create_repo("acme/same", **KERNEL)
        except HfHubHTTPError as error:
            if error.response.status_code != 409:
                raise
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(8))) == 1


def test_two_processes_share_a_store(tmp_path: Path) -> None:
    with running_hub(tmp_path / "store") as here, serving(here.store) as (_, there):
        api = HfApi(endpoint=there, token=False)
        api.create_repo("acme/a", **KERNEL)
        urls = [here.url, there] * 4
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: post_commit(urls[i], "acme/a", "main", {f"{i}": b"x"}), range(8)))
        assert len({oid(answer) for answer in answers}) == 8
        assert sorted(api.list_repo_files("acme/a", **KERNEL)) == [str(i) for i in range(8)]
        assert fsck(here.store / "acme/a.git") == ""


def test_readers_go_on_while_a_writer_holds_the_lock(hub: Hub, api: HfApi, repo: str) -> None:
    oid(post_commit(hub.url, repo, "v1", {"a": b"old"}))
    with ThreadPoolExecutor(20) as pool, Store(hub.store).open_for_writing(repo):
        waiting = [pool.submit(post_commit, hub.url, repo, "v1", {f"n{i}": b"x"}) for i in range(20)]
        time.sleep(0.3)
        assert read(hub.url, repo, "a") == b"old"
        assert not any(job.done() for job in waiting)
        assert len(api.list_repo_files(repo, revision="v1", **KERNEL)) == 1
    assert all(job.result()[0] == 200 for job in waiting)


def test_a_lock_that_stays_taken_is_reported(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", lock_timeout_s=0.2)
    store.create("acme/a")
    from pallas_hub.registry.server.protocol import HubError

    with store.open_for_writing("acme/a"):
        failures = []

        def write() -> None:
            try:
                with store.open_for_writing("acme/a"):
                    pass
            except HubError as error:
                failures.append((error.status, error.message))

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert failures == [(503, "acme/a is being written to by somebody else for over 0.2 s. Try again.")]


def test_a_lock_of_git_itself_is_respected(hub: Hub, api: HfApi, repo: str) -> None:
    before = head(api, repo)
    lock = hub.store / f"{repo}.git" / "refs" / "heads" / "v1.lock"
    lock.touch()
    status, headers, _ = post_commit(hub.url, repo, "v1", {"a": b"x"})
    assert (status, headers["X-Error-Message"]) == (
        503,
        f"{repo}: a git process holds {lock}. Try again; if no git process is at work there, delete that file.",
    )
    assert lock.exists()
    assert head(api, repo) == before
    lock.unlink()
    oid(post_commit(hub.url, repo, "v1", {"a": b"x"}))


# Each entry makes the writer kill itself (SIGKILL: no handler, no cleanup) at one point of a commit of three files.
KILL_POINTS = {
    "before the first object is in place": "at('tmp_obj_', 1)",
    "between two objects": "at('tmp_obj_', 3)",
    "before the commit object": "at('tmp_obj_', 6)",
    "before the ref moves": "writing.move_ref = lambda *a: die()",
    "with the new ref in its lock file": "at('refs/heads/v1', 1)",
}
KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from pallas_hub.registry.server import Store, writing

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def at(part, number):
    seen = 0
    replace = os.replace
    def counted(src, dst, **options):
        nonlocal seen
        if part in os.fsdecode(src) or part in os.fsdecode(dst):
            seen += 1
            if seen == number:
                die()
        return replace(src, dst, **options)
    os.replace = counted

store = Store(Path(sys.argv[1]))
with store.open_for_writing("acme/tiny-kernel") as repo:
    exec(sys.argv[2])
    writing.commit(repo, "acme/tiny-kernel", "v1", Path(sys.argv[3]).read_bytes().splitlines(True), {})
print("not killed")
"""


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_killed_writer_leaves_the_old_version(hub: Hub, api: HfApi, repo: str, tmp_path: Path, point: str) -> None:
    old = oid(post_commit(hub.url, repo, "v1", {"a": b"old", "d/b": b"old"}))
    new = {"a": b"new a", "d/b": b"new b", "d/c": b"new c"}  # three blobs, two trees, one commit
    (tmp_path / "body").write_bytes(commit_lines(new))
    env = client_env(tmp_path, hub.url)
    result = run_python(KILLED_WRITER, env, str(hub.store), KILL_POINTS[point], str(tmp_path / "body"))
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, ""), result.stderr

    assert head(api, repo) == old
    assert (read(hub.url, repo, "a"), read(hub.url, repo, "d/b")) == (b"old", b"old")
    assert sorted(api.list_repo_files(repo, revision="v1", **KERNEL)) == ["a", "d/b"]
    assert fsck(hub.store / f"{repo}.git") == ""

    oid(post_commit(hub.url, repo, "v1", new))
    assert read(hub.url, repo, "d/c") == b"new c"
    for leftover in ("*.lock", "tmp_obj_*"):
        assert list((hub.store / f"{repo}.git").rglob(leftover)) == []
    assert not (hub.store / f"{repo}.git" / "pallas-hub-writing").exists()
    assert fsck(hub.store / f"{repo}.git") == ""


def test_a_server_killed_again_and_again_never_shows_half_a_version(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running_hub(store) as hub:
        HfApi(endpoint=hub.url, token=False).create_repo("acme/a", **KERNEL)
    random.seed(0)
    acknowledged = b"none"
    for round_ in range(5):
        with serving(store) as (process, url):
            killer = threading.Timer(random.uniform(0.05, 0.6), process.kill)
            killer.start()
            try:
                for number in range(200):
                    value = b"%d.%d" % (round_, number)
                    oid(post_commit(url, "acme/a", "main", {f"part{i}": value for i in range(5)}))
                    acknowledged = value
            except (OSError, ValueError):
                pass  # the server is gone
            killer.join()
        with running_hub(store) as hub:
            parts = (
                {read(hub.url, "acme/a", f"part{i}", "main") for i in range(5)} if acknowledged != b"none" else set()
            )
            assert len(parts) <= 1, "all files of one commit, or none"
            assert not parts or as_numbers(parts.pop()) >= as_numbers(acknowledged)
    assert acknowledged != b"none"
    assert fsck(store / "acme/a.git") == ""


def as_numbers(value: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in value.split(b"."))


@pytest.mark.parametrize("place", ["third object", "ref"])
def test_a_store_without_room_keeps_the_old_version(
    hub: Hub, api: HfApi, repo: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    old = oid(post_commit(hub.url, repo, "v1", {"a": b"old"}))
    loose = set((hub.store / f"{repo}.git" / "objects").rglob("*"))
    calls = 0

    def fail_third(*args: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args, **options)

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = objects.write_object
    with monkeypatch.context() as patch:
        if place == "ref":
            patch.setattr(DiskRefsContainer, "set_if_equals", fail)
        else:
            patch.setattr(objects, "write_object", fail_third)
        status, headers, _ = post_commit(hub.url, repo, "v1", {f"n{i}": b"%d" % i for i in range(4)})
    assert status == 507
    assert headers["X-Error-Message"] == (
        f"the store {hub.store} has no room left (No space left on device); nothing was changed, {repo} is as "
        "before. Free some space there, or serve a store on a larger disk."
    )
    assert head(api, repo) == old
    left = {path for path in (hub.store / f"{repo}.git" / "objects").rglob("*") if path.is_file()}
    assert left <= loose, "the objects of the failed commit take up no room"
    oid(post_commit(hub.url, repo, "v1", {"n": b"1"}))
    assert fsck(hub.store / f"{repo}.git") == ""


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not shutil.which("mount"):
        pytest.skip("needs mount")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# dulwich closes the lock file of a ref only when it is collected, if the disk is full.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_is_really_full(tiny_disk: Path, tmp_path: Path) -> None:
    noise = random.Random(0)
    with running_hub(tiny_disk / "store") as hub:
        api = HfApi(endpoint=hub.url, token=False)
        api.create_repo("acme/a", **KERNEL)
        old = oid(post_commit(hub.url, "acme/a", "main", {"a": noise.randbytes(100_000)}))
        for size in (3_000_000, 5_000_000):  # held in memory while received; larger than that, in a file of the store
            files = [CommitOperationAdd(f"big{i}", noise.randbytes(size // 8)) for i in range(8)]
            with pytest.raises(HfHubHTTPError, match=r"has no room left .*nothing was changed, acme/a is as before"):
                api.create_commit("acme/a", files, commit_message="big", **KERNEL)
            assert head(api, "acme/a", "main") == old
            assert list(hub.store.rglob("tmp_obj_*")) == []
            assert len(read(hub.url, "acme/a", "a", "main")) == 100_000
        oid(post_commit(hub.url, "acme/a", "main", {"small": b"fits"}))
        assert fsck(hub.store / "acme/a.git") == ""

        filler = tiny_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(HfHubHTTPError, match=r"has no room left .*nothing was changed, acme/b was not created"):
            api.create_repo("acme/b", **KERNEL)
        with pytest.raises(HfHubHTTPError, match=r"has no room left .*nothing was changed, acme/a is as before"):
            api.create_branch("acme/a", branch="v1", **KERNEL)
        assert [ref.name for ref in api.list_repo_refs("acme/a", **KERNEL).branches] == ["main"]
        assert read(hub.url, "acme/a", "small", "main") == b"fits"
        gc.collect()
        filler.unlink()
        api.create_repo("acme/b", **KERNEL)
        api.create_branch("acme/a", branch="v1", **KERNEL)
        assert fsck(hub.store / "acme/a.git") == ""


def test_too_large_commits_are_refused_with_the_limit(tmp_path: Path) -> None:
    with running_hub(tmp_path / "store", max_commit_bytes=100_000) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        api.create_repo("acme/a", **KERNEL)
        before = head(api, "acme/a", "main")
        one = [CommitOperationAdd("big", bytes(90_000))]
        with pytest.raises(
            HfHubHTTPError, match=r"at most 100000 bytes .*file 'big' has 90000 bytes, 120000 in transfer"
        ):
            api.create_commit("acme/a", one, commit_message="x", **KERNEL)
        several = [CommitOperationAdd(f"f{i}", b"%d" % i * 30_000) for i in range(4)]
        with pytest.raises(
            HfHubHTTPError, match=r"at most 100000 bytes .*this one has 16\d+ bytes. Split it"
        ) as caught:
            api.create_commit("acme/a", several, commit_message="x", **KERNEL)
        assert caught.value.response.status_code == 413
        assert head(api, "acme/a", "main") == before
        api.create_commit("acme/a", several[:2], commit_message="x", **KERNEL)


def test_a_request_cut_short_changes_nothing(hub: Hub, api: HfApi, repo: str) -> None:
    import socket

    before = head(api, repo)
    body = commit_lines({"a": b"x" * 1000, "b": b"y" * 1000})
    host, port = hub.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        lines = f"POST /api/kernels/{repo}/commit/v1 HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(lines.encode() + body[: len(body) // 2])
    time.sleep(0.3)
    assert head(api, repo) == before
    oid(post_commit(hub.url, repo, "v1", {"a": b"x"}))


def test_leftovers_of_killed_processes_are_removed_at_start(tmp_path: Path) -> None:
    import os

    store = Store(tmp_path / "store")
    old, young = store.tmp / "new-old.git", store.tmp / "new-young.git"
    for folder in (old, young):
        (folder / "objects").mkdir(parents=True)
    os.utime(old, (time.time() - 7200,) * 2)
    Store(tmp_path / "store")
    assert (old.exists(), young.exists()) == (False, True)
