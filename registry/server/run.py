"""Running the application: socket, uvicorn, signals; in this thread (`serve`) or another (`running_hub`)."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from pallas_hub.registry.errors import PallasHubError
from pallas_hub.registry.server.app import MAX_COMMIT_BYTES, create_app
from pallas_hub.registry.server.store import Store

DEFAULT_PORT = 8787
_START_TIMEOUT_S = 30.0
_OTHER_PORT = "Choose another one with --port, or --port 0 for a free one."


class ServeError(PallasHubError):
    """The server cannot start; the message names the cause and the mend."""


@dataclass(frozen=True)
class Hub:
    """A running server. `url` is the value for HF_ENDPOINT and for `HfApi(endpoint=...)`."""

    url: str
    store: Path


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn would raise the signal again after a clean stop; `serve` returns instead.
        yield


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or ServeError. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServeError(f"port {port} on {host} is in use. {_OTHER_PORT}") from error
        if error.errno == errno.EACCES:
            raise ServeError(
                f"port {port} on {host} needs privileges this user does not have. {_OTHER_PORT}"
            ) from error
        raise ServeError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}. Give an address of this "
            "machine with --host."
        ) from error
    except OverflowError as error:
        raise ServeError(f"port must be 0 to 65535; got {port}. {_OTHER_PORT}") from error


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _server(
    sock: socket.socket,
    host: str,
    store: Store,
    trusted: Sequence[str],
    token: str | None,
    limit: int,
    verbose: bool,
) -> _Server:
    allowed = ("localhost", "127.0.0.1", "[::1]", host) if is_loopback(host) else None
    app = create_app(store, trusted=trusted, token=token, max_commit_bytes=limit, allowed_hosts=allowed)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_level="info" if verbose else "warning",
        access_log=verbose,
        log_config=uvicorn.config.LOGGING_CONFIG if verbose else None,
        server_header=False,
        timeout_graceful_shutdown=10,
    )
    return _Server(config)


def serve(
    store: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    trusted: Sequence[str] = (),
    token: str | None = None,
    max_commit_bytes: int = MAX_COMMIT_BYTES,
    verbose: bool = False,
    on_ready: Callable[[Hub], None] = lambda hub: None,
) -> None:
    """Serve the store until SIGINT or SIGTERM, then finish the requests at work and return.

    Raises ServeError (port) or StoreError (directory) before anything is served. `on_ready` is called once
    the socket listens, so that a client started then is answered.
    """
    opened = Store(store)
    with listen(host, port) as sock:
        server = _server(sock, host, opened, trusted, token, max_commit_bytes, verbose)

        def stop(signum: int, frame: FrameType | None) -> None:
            server.force_exit = server.should_exit  # the second signal does not wait
            server.should_exit = True

        old = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            on_ready(Hub(_url(sock), opened.root))
            server.run(sockets=[sock])
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def running_hub(
    store: Path,
    *,
    trusted: Sequence[str] = ("pallas-hub",),
    token: str | None = None,
    max_commit_bytes: int = MAX_COMMIT_BYTES,
) -> Generator[Hub]:
    """A server on a free loopback port, in a thread of this process, for the length of the `with` block."""
    opened = Store(store)
    with listen("127.0.0.1", 0) as sock:
        server = _server(sock, "127.0.0.1", opened, trusted, token, max_commit_bytes, False)
        thread = threading.Thread(target=server.run, args=([sock],), name="pallas-hub-server", daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise ServeError("the server thread did not start; see the log above.")
                time.sleep(0.005)
            yield Hub(_url(sock), opened.root)
        finally:
            server.should_exit = True
            thread.join()
