"""What the server does not do: names that lead elsewhere, requests of web pages, writes without the token."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from server_tools import post_commit, post_json, request

from pallas_hub.registry.server import Hub, Store, StoreError, running_hub

KERNEL = {"repo_type": "kernel"}


# One server for the whole file: nothing here may change its store.
@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with running_hub(tmp_path_factory.mktemp("refusals") / "store") as running:
        yield running


@pytest.fixture(scope="module")
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


@pytest.fixture(scope="module")
def repo(api: HfApi) -> str:
    api.create_repo("acme/tiny-kernel", **KERNEL)
    api.create_branch("acme/tiny-kernel", branch="v1", **KERNEL)
    return "acme/tiny-kernel"


@pytest.mark.parametrize(
    ("organization", "name", "problem"),
    [
        (None, "a", "repo id must be 'org/name'; got organization None"),
        ("acme", "", "repo id must be 'org/name'"),
        ("acme", 3, "repo id must be 'org/name'"),
        ("..", "a", "'..' is not a valid name"),
        ("acme", "..", "'..' is not a valid name"),
        (".tmp", "a", "'.tmp' is not a valid name"),
        ("acme", "a/../../b", "'a/../../b' is not a valid name"),
        ("acme", "a--b", "'a--b' is not a valid name"),
        ("acme", "a..b", "'a..b' is not a valid name"),
        ("acme", "a b", "'a b' is not a valid name"),
        ("acme", "-a", "'-a' is not a valid name"),
        ("acme", "a\n", "is not a valid name"),
        ("acme", "ä", "is not a valid name"),
        ("acme", "a" * 97, "at most 96 characters"),
        ("acme", "a.git", "must not end with '.git'"),
        ("acme", "a.lock", "must not end with '.git' or '.lock'"),
        ("api", "a", "'api' is reserved"),
        ("Kernels", "a", "'Kernels' is reserved"),
    ],
)
def test_bad_repo_names_are_refused(hub: Hub, organization: object, name: object, problem: str) -> None:
    before = sorted(path.name for path in hub.store.iterdir())
    body = {"organization": organization, "name": name, "type": "kernel"}
    status, headers, _ = post_json(f"{hub.url}/api/repos/create", body)
    assert (status, problem in headers["X-Error-Message"]) == (400, True), headers["X-Error-Message"]
    assert sorted(path.name for path in hub.store.iterdir()) == before
    assert list((hub.store / ".tmp").iterdir()) == []


BAD_REFS = ["a..b", "a b", "a~1", "a^", "a:b", "a?", "a*", "a[", "a\\b", "-a", ".a", "a/.b", "a.lock", "a/", "/a"]
BAD_REFS += ["a//b", "a@{b", "HEAD", "refs/heads/x", "x" * 201, "0123456789" * 4, "a\x07"]
BAD_PATHS = ["..", "../a", "a/../../b", "a/..", ".", "./a", "/a", "a/", "a//b", ".git", ".git/config", "a/.GIT/x"]
BAD_PATHS += ["git~1", "a\\b", "a\x00b", "a\nb", ".g\u200cit/config", "x" * 1025, ""]


@pytest.mark.parametrize("branch", BAD_REFS)
def test_bad_branch_and_tag_names_are_refused(hub: Hub, api: HfApi, repo: str, branch: str) -> None:
    with pytest.raises(HfHubHTTPError, match="branch name") as caught:
        api.create_branch(repo, branch=branch, **KERNEL)
    assert caught.value.response.status_code == 400
    with pytest.raises(HfHubHTTPError, match="tag name") as caught:
        api.create_tag(repo, tag=branch, **KERNEL)
    assert caught.value.response.status_code == 400
    assert [ref.name for ref in api.list_repo_refs(repo, **KERNEL).branches] == ["main", "v1"]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_bad_file_paths_are_refused(hub: Hub, api: HfApi, repo: str, path: str) -> None:
    before = api.kernel_info(repo, revision="v1").sha
    status, headers, _ = post_commit(hub.url, repo, "v1", {"good": b"x", path: b"y"})
    assert (status, "file path" in headers["X-Error-Message"]) == (400, True), headers["X-Error-Message"]
    status, headers, _ = post_json(
        f"{hub.url}/api/kernels/{repo}/preupload/v1", {"files": [{"path": path, "sample": "", "size": 1}]}
    )
    assert (status, "file path" in headers["X-Error-Message"]) == (400, True)
    assert api.kernel_info(repo, revision="v1").sha == before


@pytest.mark.parametrize(
    "path",
    [
        "/kernels/acme/tiny-kernel/resolve/v1/../../../../pallas-hub-store.json",
        "/kernels/acme/tiny-kernel/resolve/v1/..%2F..%2F..%2Fpallas-hub-store.json",
        "/kernels/acme/tiny-kernel/resolve/..%2F..%2FHEAD/a",
        "/kernels/acme/tiny-kernel/resolve/HEAD/a",
        "/kernels/acme/tiny-kernel/resolve/refs%2Fheads%2F..%2Ftags%2Fx/a",
        "/kernels/..%2F.tmp/x/resolve/v1/a",
        "/kernels/acme/..%2Facme%2Ftiny-kernel/resolve/v1/a",
        "/api/kernels/acme/tiny-kernel/tree/v1/..%2F..",
        "/api/kernels/.tmp/x/refs",
        "/kernels/.locks/x/info/refs?service=git-upload-pack",
        "/acme/tiny-kernel.git/HEAD",
        "/acme/tiny-kernel.git/objects/info/packs",
        "/pallas-hub-store.json",
    ],
)
def test_no_url_leads_out_of_a_repo(hub: Hub, repo: str, path: str) -> None:
    host, port = hub.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:  # clients would tidy up the path
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.split(b" ")[1] in (b"400", b"404"), answer
    assert b"x-error-message" in answer.lower()


def test_web_pages_can_neither_write_nor_take_over_the_name(hub: Hub, repo: str) -> None:
    body = {"organization": "acme", "name": "evil", "type": "kernel"}
    status, headers, _ = post_json(f"{hub.url}/api/repos/create", body, Origin="http://example.com")
    assert (status, headers["X-Error-Message"]) == (
        403,
        "writes from web pages are refused (the request has an Origin header).",
    )
    status, headers, _ = request("GET", f"{hub.url}/api/kernels/{repo}", headers={"Host": "evil.example:80"})
    assert status == 403
    assert headers["X-Error-Message"].startswith("host 'evil.example' is not this server; it answers to")
    assert Store(hub.store).repo_ids() == [repo]


def test_with_a_token_reading_is_free_and_writing_is_not(tmp_path: Path) -> None:
    with running_hub(tmp_path / "store", token="s3cret") as hub:
        free, wrong, right = (HfApi(endpoint=hub.url, token=token) for token in (False, "other", "s3cret"))
        right.create_repo("acme/a", **KERNEL)
        right.upload_file(path_or_fileobj=b"x", path_in_repo="README.md", repo_id="acme/a", **KERNEL)
        for api in (free, wrong):
            with pytest.raises(HfHubHTTPError, match="this server wants its token for writes") as caught:
                api.create_repo("acme/b", **KERNEL)
            assert caught.value.response.status_code == 401
            for write in (api.create_branch, api.delete_branch):
                # Names that look like the requests a token is not asked for.
                with pytest.raises(HfHubHTTPError, match="wants its token"):
                    write("acme/a", branch="git-upload-pack", **KERNEL)
            with pytest.raises(HfHubHTTPError, match="wants its token"):
                api.create_tag("acme/a", tag="x", **KERNEL)
            with pytest.raises(HfHubHTTPError, match="wants its token"):
                api.delete_repo("acme/a", **KERNEL)
            assert post_commit(hub.url, "acme/a", "main", {"a": b"x"})[0] == 401
            assert [e.path for e in api.get_paths_info("acme/a", ["README.md"], **KERNEL)] == ["README.md"]
            assert api.list_repo_files("acme/a", **KERNEL) == ["README.md"]
        assert right.whoami()["name"] == "local"
        with pytest.raises(HfHubHTTPError, match="Invalid"):
            wrong.whoami()


def test_a_store_is_not_made_of_just_any_directory(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(StoreError, match=r"neither empty nor a store: it has no pallas-hub-store\.json"):
        Store(tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter.txt"]

    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file, not a directory"):
        Store(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be used: Not a directory"):
        Store(tmp_path / "file" / "below")

    Store(tmp_path / "newer")
    (tmp_path / "newer" / "pallas-hub-store.json").write_text('{"format": 2}')
    with pytest.raises(StoreError, match="has format 2; this version reads format 1"):
        Store(tmp_path / "newer")
    (tmp_path / "newer" / "pallas-hub-store.json").write_text("{")
    with pytest.raises(StoreError, match=r'is damaged; it must hold \{"format": 1\}'):
        Store(tmp_path / "newer")
