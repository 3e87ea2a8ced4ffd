"""A Hub that hangs, answers nonsense or refuses: one error with a mend, and the copy at hand where no Hub answers."""

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from types import SimpleNamespace

import pytest
from registry_shelf import CLOSED, REPO, Shelf, point_clients_at, stranger

from pallas_hub.cli import main
from pallas_hub.registry import answers, paths
from pallas_hub.registry.errors import HubUnavailable, LoadError, PublishError
from pallas_hub.registry.load import get_kernel, has_kernel, loaded_from
from pallas_hub.registry.verify import download

NONSENSE = {
    "a login page": (200, b"<html>Welcome to the hotel</html>", {}),
    "another object": (200, b"{}", {}),
    "a list": (200, b"[]", {}),
    "null": (200, b"null", {}),
    "a redirect to itself": (302, b"", {"Location": "/api/kernels/pallas-hub/tiny-scale/refs"}),
}


@pytest.fixture
def pretend(tmp_path, monkeypatch) -> Iterator[Callable]:
    """Start a server that gives one answer to everything, and point the clients at it."""
    servers = []

    def start(status: int, body: bytes, headers: dict[str, str]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        point_clients_at(url, tmp_path / "hf", monkeypatch)
        return url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("answer", NONSENSE)
def test_what_answers_but_is_no_hub_is_replaced_by_what_is_at_hand(shelf: Shelf, pretend, answer: str):
    url = pretend(*NONSENSE[answer])
    words = rf"{REPO}: {url} answers, but not as a Hub does \(.*\).*Check the network and the address of the Hub"
    for ask in (get_kernel, has_kernel):
        with pytest.raises(HubUnavailable, match=words):
            ask(REPO, sources=stranger(shelf))
    with pytest.raises(HubUnavailable, match=words):
        download(REPO)
    with pytest.raises(HubUnavailable, match=rf"{words}\. What was published before is untouched\. Publish again"):
        shelf.publish()
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "bundled"


def test_a_hub_that_wants_fewer_requests_is_replaced_by_what_is_at_hand(shelf: Shelf, pretend):
    pretend(429, b"slow down", {"Retry-After": "1"})
    with pytest.raises(HubUnavailable, match=r"cannot be reached \(HfHubHTTPError: 429 Too Many Requests for http"):
        get_kernel(REPO, sources=stranger(shelf))
    assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "bundled"


@pytest.mark.parametrize(
    ("status", "mend"),
    [
        (401, r"Log in again \(hf auth login\), or unset HF_TOKEN\."),
        (403, r"Ask its owners for access, or log in with another token \(hf auth login\)\."),
        (404, r"HF_ENDPOINT must be the address of a Hub\."),
        (407, r"Check HTTP_PROXY and HTTPS_PROXY\."),
        (418, r"Check HF_ENDPOINT\."),
    ],
)
def test_a_refusal_names_the_address_and_the_mend(shelf: Shelf, pretend, status: int, mend: str):
    message = b'{"error": "Invalid credentials in Authorization header"}'
    url = pretend(status, message, {"X-Error-Message": "Invalid credentials in Authorization header"})
    words = rf"{REPO}: {url} refused: {status} [^.]+ for {url}/api/[^.]+: Invalid credentials in Authorization header\."
    with pytest.raises(LoadError, match=f"{words} {mend}$"):
        get_kernel(REPO, sources=shelf.sources)
    with pytest.raises(PublishError, match=r"Invalid credentials in .*\. What was published before is untouched\.$"):
        shelf.publish()


def test_a_hub_that_never_answers_is_not_waited_for(shelf: Shelf, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_clients_at(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "hf", monkeypatch)
        start = perf_counter()
        with pytest.raises(HubUnavailable, match=r"cannot be reached \(ReadTimeout: timed out\)"):
            get_kernel(REPO, sources=stranger(shelf))
        with pytest.raises(HubUnavailable, match="ReadTimeout"):
            shelf.publish()
        assert loaded_from(get_kernel(REPO, sources=shelf.sources)).source == "bundled"
        assert perf_counter() - start < 30


def test_the_time_limit_is_for_our_own_requests_without_one():
    def sent(read: float | None) -> dict:
        request = SimpleNamespace(method="GET", extensions={"timeout": {"connect": None, "read": read}})
        answers._set_timeout(request)
        return request.extensions["timeout"]

    assert sent(None) == {"connect": None, "read": None}
    with answers.no_endless_wait():
        assert sent(None)["read"] == 10.0
        assert sent(3.0) == {"connect": None, "read": 3.0}
    assert sent(None) == {"connect": None, "read": None}


def test_publish_names_the_hub_it_was_told_to_publish_to(shelf: Shelf, hub_url: str):
    with pytest.raises(HubUnavailable) as caught:
        shelf.publish(endpoint=CLOSED)
    assert f"the Hub at {CLOSED} cannot be reached" in str(caught.value)
    assert "HF_HUB_OFFLINE" not in str(caught.value)
    with pytest.raises(LoadError, match=r"cannot ask nonsense: .*HF_ENDPOINT must be a URL"):
        shelf.publish(endpoint="nonsense")


def test_offline_by_wish_is_no_broken_network(shelf: Shelf, hub_url: str, tmp_path, monkeypatch, capsys):
    point_clients_at(hub_url, tmp_path / "hf", monkeypatch, offline=True)
    with pytest.raises(HubUnavailable, match=rf"HF_HUB_OFFLINE=1, so {hub_url} was not asked\. Unset it first\."):
        shelf.publish()
    assert main(["download", REPO]) == 1
    assert f"no version in the cache {tmp_path / 'hf/hub'}" in capsys.readouterr().err


def test_a_token_that_no_request_can_carry_is_named(shelf: Shelf, hub_url: str, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "tökén")
    with pytest.raises(LoadError, match=r"cannot ask http://127\S+: 'ascii' codec .* and HF_TOKEN plain ASCII\."):
        get_kernel(REPO, sources=shelf.sources)


def test_a_download_that_was_cut_short_is_named():
    words = (
        r"a/b: Consistency check failed: .*5286\)\. The download was cut short, by the Hub or by a proxy\. Try again\."
    )
    with pytest.raises(LoadError, match=words), answers.plain_errors("a/b"):
        raise OSError("Consistency check failed: file should be of size 10573 (got 5286).\nPlease retry.")


def test_a_cache_that_cannot_be_written_is_named(shelf: Shelf, hub_url: str, tmp_path, monkeypatch, capsys):
    shelf.publish()
    blocker = tmp_path / "a-file"
    blocker.write_text("")
    point_clients_at(hub_url, blocker / "hf", monkeypatch)
    for field in ("kernels", "manifests", "bridge"):
        monkeypatch.setitem(paths.OUR_SOURCES.__dict__, field, getattr(shelf.sources, field))
    words = f"{REPO}: the cache {blocker / 'hf/hub'}"
    with pytest.raises(LoadError, match=rf"{words}\S+ cannot be written \(Not a directory: .*HF_HUB_CACHE to another"):
        get_kernel(REPO, sources=shelf.sources)
    assert main(["download", REPO]) == 1
    assert words in capsys.readouterr().err
