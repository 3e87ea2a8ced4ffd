"""The Starlette application: who may ask, which handler answers, how errors look."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pallas_hub.registry.server import git_http, routes_read, routes_write
from pallas_hub.registry.server.protocol import HubError, repo_not_found
from pallas_hub.registry.server.store import Store

MAX_COMMIT_BYTES = 256 * 2**20
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Settings:
    """What the handlers know besides the request; `request.app.state.hub`."""

    store: Store
    trusted: frozenset[str] = frozenset()
    token: str | None = None
    max_commit_bytes: int = MAX_COMMIT_BYTES
    allowed_hosts: frozenset[str] | None = None
    # Writers wait for the repo's lock in threads; with threads of their own they cannot hold up readers.
    writers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(16))


def create_app(
    store: Path | Store,
    *,
    trusted: Sequence[str] = (),
    token: str | None = None,
    max_commit_bytes: int = MAX_COMMIT_BYTES,
    allowed_hosts: Sequence[str] | None = None,
) -> ASGIApp:
    """The Hub over the store directory as an ASGI application.

    trusted          organisations whose overview says trustedKernelPublisher
    token            bearer token required for writes; None: anybody may write
    max_commit_bytes limit for the body of one commit request (base64 makes it 4/3 of the files)
    allowed_hosts    host names accepted in the Host header; None: all
    """
    settings = Settings(
        store if isinstance(store, Store) else Store(store),
        frozenset(trusted),
        token,
        max_commit_bytes,
        None if allowed_hosts is None else frozenset(allowed_hosts),
    )
    handlers: dict[Any, Any] = {
        HubError: _hub_error,
        HTTPException: _no_such_route,
        ClientDisconnect: _client_gone,
        Exception: _internal_error,
    }
    app = Starlette(routes=_routes(), exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.hub = settings
    return _Gate(app, settings)


def _routes() -> list[Route]:
    read, write, git = routes_read, routes_write, git_http
    routes = [
        Route("/", read.front_page),
        Route("/api/whoami-v2", read.whoami),
        Route("/api/organizations/{owner}/overview", read.organization_overview),
        Route("/api/validate-yaml", read.validate_yaml, methods=["POST"]),
        Route("/api/repos/create", _guarded(write.create_repo), methods=["POST"]),
        Route("/api/repos/delete", _guarded(write.delete_repo), methods=["DELETE"]),
    ]
    for kind in ("kernels", "models"):
        repo = f"/api/{kind}/{{owner}}/{{name}}"
        routes += [
            Route(f"/api/{kind}", read.list_repos),
            Route(repo, read.repo_info),
            Route(f"{repo}/revision/{{revision}}", read.repo_info),
            Route(f"{repo}/refs", read.refs),
            Route(f"{repo}/tree/{{revision}}", read.tree),
            Route(f"{repo}/tree/{{revision}}/{{path:path}}", read.tree),
            Route(f"{repo}/paths-info/{{revision}}", read.paths_info, methods=["POST"]),
            Route(f"{repo}/commits/{{revision}}", read.commits),
        ]
    repo = "/api/kernels/{owner}/{name}"
    routes += [
        Route(f"{repo}/branch/{{branch}}", _guarded(write.create_branch), methods=["POST"]),
        Route(f"{repo}/branch/{{branch}}", _guarded(write.delete_branch), methods=["DELETE"]),
        Route(f"{repo}/tag/{{revision}}", _guarded(write.create_tag), methods=["POST"]),
        Route(f"{repo}/tag/{{revision}}", _guarded(write.delete_tag), methods=["DELETE"]),
        Route(f"{repo}/preupload/{{revision}}", write.preupload, methods=["POST"]),
        Route(f"{repo}/commit/{{revision}}", _guarded(write.commit), methods=["POST"]),
    ]
    for prefix in ("/kernels", ""):
        repo = f"{prefix}/{{owner}}/{{name}}"
        routes += [
            Route(f"{repo}/resolve/{{revision}}/{{path:path}}", read.resolve),
            Route(f"{repo}/raw/{{revision}}/{{path:path}}", read.resolve),
            Route(f"{repo}/info/refs", git.info_refs),
            Route(f"{repo}/git-upload-pack", git.upload_pack, methods=["POST"]),
            Route(f"{repo}/git-receive-pack", git.refuse_push, methods=["POST"]),
        ]
    page = "/kernels/{owner}/{name}"  # the URLs that create_repo and create_commit print
    return [*routes, Route(page, read.repo_page), Route(f"{page}/commit/{{revision}}", read.repo_page)]


class _Gate:
    """Before any route: keep the path as it was encoded, and refuse requests meant for another host name."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # A revision or a folder is one segment, 'refs%2Fheads%2Fv1'; decoded, it would be cut at its slashes.
        raw = scope.get("raw_path") or scope["path"].encode()
        scope = {**scope, "path": raw.decode("latin-1")}
        host = re.sub(r":\d*$", "", Request(scope).headers.get("host", ""))
        hosts = self.settings.allowed_hosts
        if hosts is not None and host not in hosts:
            # A web page can give its own host name the address 127.0.0.1, to read and write here as its own.
            message = f"host {host!r} is not this server; it answers to {', '.join(sorted(hosts))}."
            await HubError(403, message).response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _guarded(handler: Handler) -> Handler:
    """A handler that changes something: not for web pages, and only with the token if there is one."""

    async def guard(request: Request) -> Response:
        # Any page open in a browser can send requests to loopback. Browsers add Origin, the clients do not.
        if "origin" in request.headers:
            raise HubError(403, "writes from web pages are refused (the request has an Origin header).")
        token = request.app.state.hub.token
        if token is not None and not has_token(request, token):
            raise HubError(
                401,
                "this server wants its token for writes, the one given to `pallas-hub serve --token`. Set "
                "HF_TOKEN or pass token=... to the client.",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return await handler(request)

    return guard


def has_token(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _hub_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HubError)
    return error.response()


def _no_such_route(request: Request, error: Exception) -> Response:
    """What no route takes: repos of other types and ids do not exist here; all the rest is not served."""
    assert isinstance(error, HTTPException)
    parts = request.url.path.strip("/").split("/")
    if error.status_code == 405:
        return HubError(405, f"{request.method} {request.url.path} is not possible.").response()
    if parts[:2] == ["api", "models"] and request.method != "GET":
        message = 'kernel repos can be read as models, but changed only as what they are: pass repo_type="kernel".'
        return HubError(404, message, "RepoNotFound").response()
    one_name = parts[:2] == ["api", "kernels"] and len(parts) == 3
    if one_name or (len(parts) > 2 and parts[0] == "api" and parts[1] in ("models", "datasets", "spaces")):
        return repo_not_found(f"{'/'.join(parts[2:4])} ({parts[1]})").response()
    if "resolve" in parts:
        return repo_not_found("/".join(parts[: parts.index("resolve")])).response()
    return HubError(
        404, f"{request.method} {request.url.path} is not served by this server (kernel repos only)."
    ).response()


def _internal_error(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, and uvicorn logs it.
    return HubError(500, f"internal error: {type(error).__name__}: {error}").response()


def _client_gone(request: Request, error: Exception) -> Response:
    return HubError(400, "the request was cut short.").response()
