"""Publishing to a loopback Hub with the real client: idempotent, atomic, refusals in words."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from registry_shelf import Shelf, point_clients_at

from pallas_hub.registry.errors import ApiChanged, HubUnavailable, ManifestError, PublishError
from pallas_hub.registry.load import get_kernel
from pallas_hub.registry.manifest import read_manifest
from pallas_hub.registry.publish import publish
from pallas_hub.registry.record import record

REPO = "pallas-hub/tiny-scale"


def branches(url: str, repo_id: str = REPO) -> dict[str, str]:
    refs = HfApi(endpoint=url).list_repo_refs(repo_id, repo_type="kernel")
    return {branch.name: branch.target_commit for branch in refs.branches}


def files(url: str, revision: str, repo_id: str = REPO) -> list[str]:
    return sorted(HfApi(endpoint=url).list_repo_files(repo_id, repo_type="kernel", revision=revision))


def test_publishing_makes_one_commit_per_version_and_the_card_on_main(shelf: Shelf, hub_url: str):
    done = shelf.publish()
    assert branches(hub_url) == {"v1": done.commit, "main": branches(hub_url)["main"]}
    pushed = [path for path in files(hub_url, "v1") if path != ".gitattributes"]
    assert pushed == done.added
    assert {"README.md", "LICENSE", "build/torch-tpu/metadata.json", "benchmarks/benchmark_scale.py"} <= set(pushed)
    assert [path for path in files(hub_url, "main") if path != ".gitattributes"] == ["LICENSE", "README.md"]
    history = HfApi(endpoint=hub_url).list_repo_commits(REPO, repo_type="kernel", revision="v1")
    assert next(iter(history)).title == "tiny-scale v1"


def test_publishing_again_changes_nothing(shelf: Shelf, hub_url: str):
    shelf.publish(endpoint=f"{hub_url}/")  # HF_ENDPOINT may end with a slash, so this may too
    before = branches(hub_url)
    again = shelf.publish()
    assert again.up_to_date
    assert again.commit is None
    assert branches(hub_url) == before


def test_a_new_build_is_one_commit_that_also_deletes_what_is_gone(shelf: Shelf, hub_url: str):
    first = shelf.publish()
    shelf.edit("torch-ext/tiny_scale/op.py", "from .late import ANSWER\n", "ANSWER = 'inline'\n")
    (shelf.package() / "late.py").unlink()
    second = shelf.publish()
    assert second.deleted == [f"build/torch-{backend}/late.py" for backend in ("cpu", "cuda", "tpu")]
    history = HfApi(endpoint=hub_url).list_repo_commits(REPO, repo_type="kernel", revision="v1")
    assert [commit.commit_id for commit in history][:2] == [second.commit, first.commit]
    assert not [path for path in files(hub_url, "v1") if path.endswith("late.py")]


def test_an_older_version_keeps_its_branch_and_leaves_main_alone(shelf: Shelf, hub_url: str):
    shelf.publish()
    shelf.set_version(2)
    shelf.publish()
    main = branches(hub_url)["main"]
    shelf.set_version(1)
    shelf.append("op.py", "\n# a repair of version 1\n")
    done = shelf.publish()
    assert done.main_changed == []
    assert branches(hub_url)["main"] == main
    assert branches(hub_url)["v1"] == done.commit


def test_a_dry_run_lists_everything_and_pushes_nothing(shelf: Shelf, hub_url: str):
    plan = shelf.publish(dry_run=True)
    assert "build/torch-cpu/op.py" in plan.added
    assert plan.commit is None
    with pytest.raises(Exception, match="404"):
        branches(hub_url)
    done = shelf.publish()
    assert (done.added, done.main_changed) == (plan.added, plan.main_changed)


def test_an_unrecorded_build_is_not_published(shelf: Shelf, hub_url: str):
    with pytest.raises(ManifestError, match="Run: pallas-hub build tiny-scale --record"):
        publish("tiny-scale", sources=shelf.sources)


def test_the_published_api_is_kept_even_if_the_manifest_was_recorded_anew(shelf: Shelf, hub_url: str):
    shelf.publish()
    before = branches(hub_url)
    shelf.edit("torch-ext/tiny_scale/op.py", "x: Tensor, factor", "tensor: Tensor, factor")
    shelf.edit("torch-ext/tiny_scale/op.py", ".scale(x, factor)", ".scale(tensor, factor)")
    words = rf"{REPO}: version 1 on {hub_url} has another public API: scale\(x: Tensor.*publish this one as version 2"
    with pytest.raises(ApiChanged, match=words):
        shelf.publish()
    assert branches(hub_url) == before


def test_releasing_freezes_the_digests(shelf: Shelf, hub_url: str):
    assert not shelf.publish().released  # loopback: not a release unless asked for
    assert shelf.publish(release=True).released
    assert read_manifest("tiny-scale", shelf.sources).versions[1].builds[0].released


def test_sources_that_are_not_committed_are_not_released(shelf: Shelf, hub_url: str):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "kernels"]):
        subprocess.run([*git, *command], cwd=shelf.root, check=True)
    shelf.append("op.py", "\n# not committed\n")
    with pytest.raises(PublishError, match="tiny-scale: its sources have changes that are not committed"):
        shelf.publish(release=True)
    assert shelf.publish().commit  # on loopback it is a trial
    subprocess.run([*git, "commit", "--quiet", "-am", "more"], cwd=shelf.root, check=True)
    assert shelf.publish(release=True).released


def test_a_hub_that_is_down_is_named(shelf: Shelf, tmp_path: Path, monkeypatch):
    point_clients_at("http://127.0.0.1:9", tmp_path / "hf", monkeypatch)
    record("tiny-scale", shelf.sources)
    words = r"the Hub at http://127.0.0.1:9 cannot be reached .*What was published before is untouched"
    with pytest.raises(HubUnavailable, match=words):
        publish("tiny-scale", sources=shelf.sources)


def test_a_refused_token_says_how_to_log_in(shelf: Shelf, tmp_path: Path, monkeypatch):
    from pallas_hub.registry.server import running_hub

    with running_hub(tmp_path / "store", token="secret") as hub:
        point_clients_at(hub.url, tmp_path / "hf", monkeypatch)
        record("tiny-scale", shelf.sources)
        with pytest.raises(PublishError, match=r"not allowed to write on http://.*hf auth login, or HF_TOKEN"):
            publish("tiny-scale", token="wrong", sources=shelf.sources)
        assert publish("tiny-scale", token="secret", sources=shelf.sources).commit


def test_a_refusal_of_the_hub_is_passed_on(shelf: Shelf, tmp_path: Path, monkeypatch):
    from pallas_hub.registry.server import running_hub

    with running_hub(tmp_path / "store", max_commit_bytes=2_000) as hub:
        point_clients_at(hub.url, tmp_path / "hf", monkeypatch)
        with pytest.raises(PublishError, match=rf"{REPO}: {hub.url} answered 413 .*What was published before is unt"):
            shelf.publish()
        assert "v1" not in branches(hub.url)


@pytest.mark.parametrize(
    ("status", "words"), [(507, "no room left on http"), (429, "answered 429"), (409, "publish again")]
)
def test_other_statuses_have_words_too(status: int, words: str):
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    from pallas_hub.registry.publish import _words

    request = httpx2.Request("POST", "http://hub/api")
    with pytest.raises(PublishError, match=words), _words(REPO, "http://hub"):
        raise HfHubHTTPError("said no", response=httpx2.Response(status, request=request))


KILL = """
import os, signal, sys
from pathlib import Path
from huggingface_hub import HfApi
from pallas_hub.registry.paths import Sources
from pallas_hub.registry.publish import publish

root, method, when, count = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
real, seen = getattr(HfApi, method), []

def killed(*args, **kwargs):
    seen.append(1)
    if when == "before" and len(seen) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*args, **kwargs)
    if when == "after" and len(seen) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(HfApi, method, killed)
publish("tiny-scale", sources=Sources(root / "kernels", root / "manifests", root / "bridge"))
"""


@pytest.mark.parametrize(
    ("version", "method", "when", "count"),
    [
        (1, "create_commit", "before", 1),
        (2, "create_branch", "after", 1),
        (2, "create_commit", "after", 1),
        (2, "create_branch", "before", 2),
    ],
)
def test_a_killed_publish_leaves_what_was_published(shelf: Shelf, hub_url: str, version, method, when, count):
    old = shelf.publish()
    shelf.set_version(version)
    shelf.append("op.py", "\n# the next build\n")
    record("tiny-scale", shelf.sources)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", KILL, str(shelf.root), method, when, str(count)]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -signal.SIGKILL
    now = branches(hub_url)
    assert now["v1"] == old.commit
    assert "v2" not in now
    assert get_kernel(REPO, trust_remote_code=True, sources=shelf.sources).scale(torch.ones(1)).item() == 2.0
    assert shelf.publish().commit == branches(hub_url)[f"v{version}"]
    assert sorted(branches(hub_url)) == sorted({"main", "v1", f"v{version}"})


def test_a_push_in_between_is_not_overwritten(shelf: Shelf, hub_url: str, monkeypatch):
    shelf.publish()
    shelf.append("op.py", "\n# ours\n")
    real = HfApi.create_commit

    def somebody_is_faster(self, repo_id, operations, **kwargs):
        from huggingface_hub import CommitOperationAdd

        monkeypatch.setattr(HfApi, "create_commit", real)
        theirs = [CommitOperationAdd("NOTES.md", b"theirs")]
        real(self, repo_id, theirs, commit_message="theirs", repo_type="kernel", revision="v1")
        return real(self, repo_id, operations, **kwargs)

    monkeypatch.setattr(HfApi, "create_commit", somebody_is_faster)
    with pytest.raises(PublishError, match="somebody else pushed at the same time; publish again"):
        shelf.publish()
    assert "NOTES.md" in files(hub_url, "v1")
