"""HfApi against the server: every call a publisher or a loader makes."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from server_tools import post_commit, post_json, request, write_kernel_repo

from pallas_hub.registry.server import Hub

KERNEL = {"repo_type": "kernel"}


def add(path: str, content: bytes = b"x") -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


def commit(api: HfApi, repo: str, *operations: object, revision: str = "v1", **options: object) -> str:
    info = api.create_commit(
        repo, list(operations), commit_message="Change\n\nwhy", revision=revision, repo_type="kernel", **options
    )
    return info.oid


def test_create_repo_gives_a_url_and_a_first_commit_on_main(hub: Hub, api: HfApi) -> None:
    url = api.create_repo("acme/a", **KERNEL)
    assert str(url) == f"{hub.url}/kernels/acme/a"
    assert (url.repo_id, url.repo_type) == ("acme/a", "kernel")
    refs = api.list_repo_refs("acme/a", **KERNEL)
    assert [branch.name for branch in refs.branches] == ["main"]
    assert list(api.list_repo_tree("acme/a", **KERNEL)) == []


def test_create_repo_twice_is_refused_unless_asked_for(api: HfApi) -> None:
    first = api.create_repo("acme/a", **KERNEL)
    with pytest.raises(HfHubHTTPError, match="repository acme/a exists already") as caught:
        api.create_repo("acme/a", **KERNEL)
    assert caught.value.response.status_code == 409
    assert api.create_repo("acme/a", exist_ok=True, **KERNEL) == first


def test_other_repo_types_and_private_repos_are_refused(api: HfApi) -> None:
    with pytest.raises(BadRequestError, match="repos of type \"kernel\" only; got 'model'"):
        api.create_repo("acme/a")
    with pytest.raises(BadRequestError, match="no private repos"):
        api.create_repo("acme/a", private=True, **KERNEL)


def test_delete_repo_removes_it_and_leaves_room_for_a_new_one(hub: Hub, api: HfApi, repo: str) -> None:
    commit(api, repo, add("old.txt"))
    api.delete_repo(repo, **KERNEL)
    with pytest.raises(RepositoryNotFoundError, match="acme/tiny-kernel does not exist on this server"):
        api.list_repo_refs(repo, **KERNEL)
    with pytest.raises(RepositoryNotFoundError):
        api.delete_repo(repo, **KERNEL)
    api.delete_repo(repo, missing_ok=True, **KERNEL)
    assert not (hub.store / "acme").exists()
    api.create_repo(repo, **KERNEL)
    assert api.list_repo_files(repo, **KERNEL) == []


def test_upload_folder_then_tree_lists_every_file_and_folder(api: HfApi, repo: str, tmp_path: Path) -> None:
    folder = write_kernel_repo(tmp_path / "kernel")
    api.upload_folder(repo_id=repo, folder_path=folder, revision="v1", **KERNEL)
    expected = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    entries = list(api.list_repo_tree(repo, revision="v1", recursive=True, **KERNEL))
    assert sorted(entry.path for entry in entries) == expected
    readme = next(entry for entry in entries if entry.path == "README.md")
    assert readme.size == (folder / "README.md").stat().st_size

    top = [entry.path for entry in api.list_repo_tree(repo, revision="v1", **KERNEL)]
    assert sorted(top) == ["README.md", "benchmarks", "build"]
    deep = [e.path for e in api.list_repo_tree(repo, "build/torch-cpu", revision="v1", **KERNEL)]
    assert sorted(deep) == [f"build/torch-cpu/{n}" for n in ("__init__.py", "metadata.json", "op.py")]
    with pytest.raises(EntryNotFoundError, match="'build/torch-tpu' does not exist in acme/tiny-kernel"):
        list(api.list_repo_tree(repo, "build/torch-tpu", revision="v1", **KERNEL))


def test_upload_of_the_same_folder_makes_no_commit(api: HfApi, repo: str, tmp_path: Path) -> None:
    folder = write_kernel_repo(tmp_path / "kernel")
    first = api.upload_folder(repo_id=repo, folder_path=folder, revision="v1", **KERNEL)
    again = api.upload_folder(repo_id=repo, folder_path=folder, revision="v1", **KERNEL)
    assert again.oid == first.oid
    assert len(api.list_repo_commits(repo, revision="v1", **KERNEL)) == 2


def test_upload_with_delete_patterns_replaces_the_folder(api: HfApi, repo: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, name in ((old, "a.py"), (new, "b.py")):
        (folder / "build").mkdir(parents=True)
        (folder / "build" / name).write_text(name)
    api.upload_folder(repo_id=repo, folder_path=old, revision="v1", **KERNEL)
    api.upload_folder(repo_id=repo, folder_path=new, revision="v1", delete_patterns="*", **KERNEL)
    assert api.list_repo_files(repo, revision="v1", **KERNEL) == ["build/b.py"]


def test_gitignored_files_are_left_out(api: HfApi, repo: str, tmp_path: Path) -> None:
    (tmp_path / "k" / "out").mkdir(parents=True)
    (tmp_path / "k" / ".gitignore").write_text("*.log\nout/\n")
    for name in ("a.py", "a.log", "out/b.py"):
        (tmp_path / "k" / name).write_text("x")
    api.upload_folder(repo_id=repo, folder_path=tmp_path / "k", revision="v1", **KERNEL)
    assert sorted(api.list_repo_files(repo, revision="v1", **KERNEL)) == [".gitignore", "a.py"]


def test_commit_adds_deletes_and_copies(api: HfApi, repo: str) -> None:
    commit(api, repo, add("a"), add("d/b"), add("d/c"), add("e"))
    commit(
        api,
        repo,
        CommitOperationDelete("d/"),
        CommitOperationDelete("e"),
        add("d", b"now a file"),
    )
    assert sorted(api.list_repo_files(repo, revision="v1", **KERNEL)) == ["a", "d"]
    with pytest.raises(EntryNotFoundError, match="'gone' does not exist"):
        commit(api, repo, CommitOperationDelete("gone"))


def test_a_file_cannot_become_a_folder_unnoticed(api: HfApi, repo: str) -> None:
    commit(api, repo, add("a"))
    with pytest.raises(BadRequestError, match="'a' cannot be a file and the folder of 'a/b' at once"):
        commit(api, repo, add("a/b"))


def test_stale_parent_commit_is_refused(api: HfApi, repo: str) -> None:
    start = api.kernel_info(repo, revision="v1").sha
    now = commit(api, repo, add("a"), parent_commit=start)
    with pytest.raises(HfHubHTTPError, match=rf"must be at parentCommit {start}, but is at {now}") as caught:
        commit(api, repo, add("b"), parent_commit=start)
    assert caught.value.response.status_code == 412
    commit(api, repo, add("b"), parent_commit=now[:10])
    assert sorted(api.list_repo_files(repo, revision="v1", **KERNEL)) == ["a", "b"]


def test_commit_to_what_is_no_branch_is_refused(api: HfApi, repo: str) -> None:
    sha = api.kernel_info(repo).sha
    for revision in ("v2", sha, "refs/tags/x"):
        with pytest.raises(RevisionNotFoundError, match=rf"revision '{revision}' does not exist"):
            commit(api, repo, add("a"), revision=revision)
    with pytest.raises(BadRequestError, match="no pull requests"):
        commit(api, repo, add("a"), create_pr=True)


def test_history_names_the_commits(api: HfApi, repo: str) -> None:
    sha = commit(api, repo, add("a"))
    newest, first = api.list_repo_commits(repo, revision="v1", **KERNEL)
    assert (newest.commit_id, newest.title, newest.message) == (sha, "Change", "why")
    assert first.title == "initial commit"
    assert abs(newest.created_at - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(minutes=5)


@pytest.mark.parametrize("name", ["v1", "refs/heads/v1", "release", "refs/tags/release", "dev/x", "sha"])
def test_every_form_of_a_revision_is_understood(api: HfApi, repo: str, name: str) -> None:
    sha = commit(api, repo, add("a"))
    api.create_tag(repo, tag="release", revision="v1", tag_message="first", **KERNEL)
    api.create_branch(repo, branch="dev/x", revision="v1", **KERNEL)
    revision = sha if name == "sha" else name
    assert api.kernel_info(repo, revision=revision).sha == sha
    assert api.list_repo_files(repo, revision=revision, **KERNEL) == ["a"]


def test_branches_and_tags_come_and_go(api: HfApi, repo: str) -> None:
    sha = commit(api, repo, add("a"))
    api.create_tag(repo, tag="plain", revision="v1", **KERNEL)
    api.create_tag(repo, tag="with-message", revision=sha, tag_message="note", **KERNEL)
    api.create_branch(repo, branch="v2", revision=sha, **KERNEL)
    refs = api.list_repo_refs(repo, **KERNEL)
    assert {(ref.name, ref.ref) for ref in refs.branches} == {
        (name, f"refs/heads/{name}") for name in ("main", "v1", "v2")
    }
    assert {ref.name: ref.target_commit for ref in refs.tags} == {"plain": sha, "with-message": sha}

    with pytest.raises(HfHubHTTPError, match="tag 'plain' exists already") as caught:
        api.create_tag(repo, tag="plain", **KERNEL)
    assert caught.value.response.status_code == 409
    api.create_tag(repo, tag="plain", exist_ok=True, **KERNEL)
    with pytest.raises(HfHubHTTPError, match="branch 'v2' exists already"):
        api.create_branch(repo, branch="v2", **KERNEL)
    api.create_branch(repo, branch="v2", exist_ok=True, **KERNEL)
    with pytest.raises(HfHubHTTPError, match="branch 'v2/x' collides with branch 'v2'"):
        api.create_branch(repo, branch="v2/x", **KERNEL)

    api.delete_tag(repo, tag="plain", **KERNEL)
    api.delete_branch(repo, branch="v2", **KERNEL)
    with pytest.raises(RevisionNotFoundError):
        api.delete_tag(repo, tag="plain", **KERNEL)
    with pytest.raises(BadRequestError, match="branch 'main' of acme/tiny-kernel cannot be deleted"):
        api.delete_branch(repo, branch="main", **KERNEL)
    refs = api.list_repo_refs(repo, include_pull_requests=True, **KERNEL)
    assert [ref.name for ref in refs.branches] == ["main", "v1"]
    assert [ref.name for ref in refs.tags] == ["with-message"]
    assert refs.pull_requests == []


def test_paths_info_leaves_out_what_is_not_there(hub: Hub, api: HfApi, repo: str) -> None:
    commit(api, repo, add("d/a", b"12345"))
    found = api.get_paths_info(repo, ["d", "d/a", "nope", "d/a/b", "../x"], revision="v1", **KERNEL)
    assert [entry.path for entry in found] == ["d", "d/a"]
    assert found[1].size == 5
    _, _, body = post_json(f"{hub.url}/api/kernels/{repo}/paths-info/v1", {"paths": ["d/a"]})
    assert [entry["path"] for entry in json.loads(body)] == ["d/a"]
    assert api.file_exists(repo, "d/a", revision="v1", **KERNEL)
    assert not api.file_exists(repo, "d", revision="v1", **KERNEL)
    assert api.revision_exists(repo, "v1", **KERNEL)
    assert not api.revision_exists(repo, "v9", **KERNEL)
    assert api.repo_exists(repo, **KERNEL)
    assert not api.repo_exists("acme/other", **KERNEL)


def test_snapshot_download_gives_the_same_bytes(api: HfApi, repo: str, tmp_path: Path) -> None:
    files = {"a.bin": bytes(range(256)) * 4097, "empty": b"", "deep/ü ñ+#%&?.txt": "ß".encode(), "d/e/f": b"\0"}
    sha = commit(api, repo, *(add(path, content) for path, content in files.items()))
    local = Path(api.snapshot_download(repo, revision="v1", cache_dir=tmp_path / "cache", **KERNEL))
    assert local.name == sha
    found = {str(p.relative_to(local)): p.read_bytes() for p in local.rglob("*") if p.is_file()}
    assert found == files


def test_missing_things_raise_the_error_the_clients_tell_apart(api: HfApi, repo: str, tmp_path: Path) -> None:
    options = {"cache_dir": tmp_path / "cache", **KERNEL}
    with pytest.raises(EntryNotFoundError, match=r"'nope.txt' does not exist in acme/tiny-kernel at [0-9a-f]{40}"):
        api.hf_hub_download(repo, "nope.txt", revision="v1", **options)
    absent = list((tmp_path / "cache").rglob(".no_exist/*/nope.txt"))
    assert len(absent) == 1, "the client caches the absence, by X-Repo-Commit"
    with pytest.raises(RevisionNotFoundError, match="revision 'v9' does not exist in acme/tiny-kernel"):
        api.hf_hub_download(repo, "nope.txt", revision="v9", **options)
    with pytest.raises(RepositoryNotFoundError, match="acme/other does not exist on this server"):
        api.hf_hub_download("acme/other", "nope.txt", **options)
    for other in ("model", "dataset"):
        with pytest.raises(RepositoryNotFoundError):
            api.repo_info("acme/other", repo_type=other)
    with pytest.raises(RepositoryNotFoundError):
        api.hf_hub_download("gpt2", "config.json", cache_dir=tmp_path / "cache")


def test_kernel_repos_can_be_read_as_models_but_not_changed(api: HfApi, repo: str, tmp_path: Path) -> None:
    sha = commit(api, repo, add("a", b"hello"))
    assert api.model_info(repo, revision="v1", files_metadata=True).siblings[0].size == 5
    local = api.snapshot_download(repo, revision="v1", cache_dir=tmp_path / "cache")
    assert Path(local, "a").read_bytes() == b"hello"
    assert Path(local).name == sha
    with pytest.raises(RepositoryNotFoundError, match=r'changed only .* pass repo_type="kernel"'):
        api.create_commit(repo, [add("b")], commit_message="x", revision="v1")


def test_list_models_and_the_front_page_show_the_repos(hub: Hub, api: HfApi, repo: str) -> None:
    api.create_repo("other/thing", **KERNEL)
    assert [model.id for model in api.list_models()] == ["acme/tiny-kernel", "other/thing"]
    assert [model.id for model in api.list_models(author="other")] == ["other/thing"]
    status, _, body = request("GET", f"{hub.url}/")
    assert status == 200
    assert f"export HF_ENDPOINT={hub.url}" in body.decode()
    assert f"{hub.url}/kernels/acme/tiny-kernel" in body.decode()
    info = api.create_commit(repo, [add("a.py")], commit_message="x", revision="v1", **KERNEL)
    for page, files in ((f"{hub.url}/kernels/acme/tiny-kernel", "none"), (info.commit_url, "a.py")):
        status, _, body = request("GET", page)
        assert status == 200
        assert f"git clone {hub.url}/kernels/acme/tiny-kernel\nbranches and tags: main, v1\n" in body.decode()
        assert f"files:\n  {files}\n" in body.decode()


def test_organisations_are_trusted_only_when_named(api: HfApi) -> None:
    assert api.get_organization_overview("pallas-hub").trustedKernelPublisher is True
    assert api.get_organization_overview("acme").trustedKernelPublisher is False


def test_whoami_accepts_any_token_when_none_is_set(api: HfApi, repo: str) -> None:
    answer = api.whoami(token="anything")
    assert answer["name"] == "local"
    assert [org["name"] for org in answer["orgs"]] == ["acme", "pallas-hub"]


def test_readme_metadata_is_checked_before_an_upload(api: HfApi, repo: str) -> None:
    commit(api, repo, add("README.md", b"---\nlicense: mit\n---\nfine\n"))
    commit(api, repo, add("README.md", b"no metadata at all"))
    for text, problem in (
        (b"---\na: [\n---\n", "is not valid YAML"),
        (b"---\n- a\n---\n", "must be a mapping; got list"),
    ):
        with pytest.raises(ValueError, match=problem):
            commit(api, repo, add("README.md", text))


def test_resolve_answers_head_get_and_ranges(hub: Hub, api: HfApi, repo: str) -> None:
    sha = commit(api, repo, add("a", b"0123456789"))
    url = f"{hub.url}/kernels/{repo}/resolve/v1/a"
    status, headers, body = request("HEAD", url)
    assert (status, body) == (200, b"")
    assert (headers["X-Repo-Commit"], headers["Content-Length"], headers["Accept-Ranges"]) == (sha, "10", "bytes")
    blob = api.get_paths_info(repo, ["a"], revision="v1", **KERNEL)[0].blob_id
    assert headers["ETag"] == f'"{blob}"'
    for span, expected, content_range in (
        ("bytes=3-5", b"345", "bytes 3-5/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=8-99", b"89", "bytes 8-9/10"),
    ):
        status, headers, body = request("GET", url, headers={"Range": span})
        assert (status, body, headers["Content-Range"]) == (206, expected, content_range)
    for ignored in ("bytes=5-3", "bytes=0-1,4-5", "lines=1-2", "bytes=-"):
        assert request("GET", url, headers={"Range": ignored})[0::2] == (200, b"0123456789")
    status, headers, _ = request("GET", url, headers={"Range": "bytes=10-"})
    assert (status, headers["Content-Range"]) == (416, "bytes */10")
    assert "lies outside the 10 bytes" in headers["X-Error-Message"]


def test_interrupted_download_is_resumed(api: HfApi, repo: str, tmp_path: Path) -> None:
    content = bytes(range(251)) * 1000
    commit(api, repo, add("a", content))
    blob = api.get_paths_info(repo, ["a"], revision="v1", **KERNEL)[0].blob_id
    partial = tmp_path / "local" / ".cache" / "huggingface" / "download"
    partial.mkdir(parents=True)
    api.hf_hub_download(repo, "a", revision="v1", local_dir=tmp_path / "local", **KERNEL)
    (tmp_path / "local" / "a").unlink()
    for path in partial.glob("*.metadata"):
        path.unlink()
    (partial / f"{blob}.incomplete").write_bytes(content[:1000])
    again = api.hf_hub_download(repo, "a", revision="v1", local_dir=tmp_path / "local", **KERNEL)
    assert Path(again).read_bytes() == content


def test_errors_carry_code_and_message(hub: Hub, repo: str) -> None:
    for path, code in (
        ("/api/kernels/acme/nope", "RepoNotFound"),
        (f"/api/kernels/{repo}/revision/v9", "RevisionNotFound"),
        (f"/api/kernels/{repo}/tree/v1/nope", "EntryNotFound"),
        ("/acme/nope/resolve/main/a", "RepoNotFound"),
        ("/api/datasets/acme/nope", "RepoNotFound"),
        ("/api/kernels/nope", "RepoNotFound"),
    ):
        status, headers, body = request("GET", hub.url + path)
        assert (status, headers["X-Error-Code"]) == (404, code)
        assert headers["X-Error-Message"].encode() in body
    status, headers, _ = request("GET", f"{hub.url}/api/spaces-or-so")
    assert (status, headers["X-Error-Code"]) == (404, None)
    assert "GET /api/spaces-or-so is not served by this server" in headers["X-Error-Message"]
    status, headers, _ = post_json(f"{hub.url}/api/kernels/{repo}", {})
    assert (status, headers["X-Error-Message"]) == (405, f"POST /api/kernels/{repo} is not possible.")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "needs a 'header' line; the request has none"),
        (b"not json\n", "commit line 1 must be"),
        (b'{"key": "header", "value": 3}\n', "the value of 'header' must be an object"),
        (b'{"key": "header", "value": {}}\n{"key": "copyFile", "value": {}}\n', "unknown key 'copyFile'"),
        (b'{"key": "lfsFile", "value": {"path": "a"}}\n', "it has no LFS or Xet storage"),
        (b'{"key": "file", "value": {"path": "a", "content": "!", "encoding": "base64"}}\n', "not valid base64"),
        (b'{"key": "file", "value": {"path": "a", "content": "", "encoding": "zip"}}\n', "got 'zip'"),
        (b'{"key": "file", "value": {"path": "a"}}\n', "'content' must be a string"),
    ],
)
def test_bad_commit_requests_change_nothing(hub: Hub, api: HfApi, repo: str, body: bytes, problem: str) -> None:
    before = api.kernel_info(repo, revision="v1").sha
    status, headers, _ = request("POST", f"{hub.url}/api/kernels/{repo}/commit/v1", body)
    assert status == 400
    assert problem in headers["X-Error-Message"]
    assert api.kernel_info(repo, revision="v1").sha == before


def test_a_commit_without_changes_returns_the_old_one(hub: Hub, repo: str) -> None:
    first = post_commit(hub.url, repo, "v1", {"a": b"1"})[2]
    again = post_commit(hub.url, repo, "v1", {"a": b"1"})[2]
    assert first == again
