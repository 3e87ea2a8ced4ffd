"""Whatever is committed, in whatever order: the server shows what a plain dictionary would hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from server_tools import fsck, post_commit, post_json, request

from pallas_hub.registry.server import Hub, running_hub
from pallas_hub.registry.server.names import check_file_path
from pallas_hub.registry.server.protocol import HubError

REPO = "acme/any"
counter = iter(range(10**6))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with running_hub(tmp_path_factory.mktemp("properties") / "store") as running:
        body = {"organization": "acme", "name": "any", "type": "kernel"}
        assert post_json(f"{running.url}/api/repos/create", body)[0] == 200
        yield running
        assert fsck(running.store / f"{REPO}.git") == ""


def accepted(path: str) -> bool:
    try:
        check_file_path(path)
    except HubError:
        return False
    return True


few_names = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "f"])
any_name = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3).map("/".join).filter(accepted)
content = st.binary(max_size=40)


def fresh_branch(hub: Hub) -> str:
    branch = f"b{next(counter)}"
    assert post_json(f"{hub.url}/api/kernels/{REPO}/branch/{branch}", {})[0] == 200
    return branch


def shown(hub: Hub, branch: str) -> dict[str, bytes]:
    """path -> content, as the tree and resolve endpoints tell it."""
    status, _, body = request("GET", f"{hub.url}/api/kernels/{REPO}/tree/{branch}?recursive=true")
    assert status == 200
    found = {}
    for entry in json.loads(body):
        if entry["type"] == "file":
            url = f"{hub.url}/kernels/{REPO}/resolve/{branch}/{quote(entry['path'])}"
            status, headers, found[entry["path"]] = request("GET", url)
            assert (status, headers["ETag"]) == (200, f'"{entry["oid"]}"')
            assert len(found[entry["path"]]) == entry["size"]
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.dictionaries(few_names, content, max_size=3), st.sets(few_names)), max_size=4))
def test_commits_add_up_like_a_dictionary(hub: Hub, commits: list[tuple[dict[str, bytes], set[str]]]) -> None:
    branch = fresh_branch(hub)
    expected: dict[str, bytes] = {}
    for added, deleted in commits:
        status, headers, _ = post_commit(hub.url, REPO, branch, added, deleted=sorted(deleted))
        if deleted <= set(expected):
            assert status == 200, headers["X-Error-Message"]
            expected = {path: data for path, data in expected.items() if path not in deleted} | added
        else:
            assert (status, headers["X-Error-Code"]) == (404, "EntryNotFound")
        assert shown(hub, branch) == expected


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(any_name, content, min_size=1, max_size=4))
def test_any_path_and_content_comes_back(hub: Hub, files: dict[str, bytes]) -> None:
    folders = {path[:i] for path in files for i, c in enumerate(path) if c == "/"}
    assume(not folders & set(files))
    branch = fresh_branch(hub)
    status, headers, _ = post_commit(hub.url, REPO, branch, files)
    assert status == 200, headers["X-Error-Message"]
    assert shown(hub, branch) == files
