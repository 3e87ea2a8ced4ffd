"""Handlers that change nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote

import yaml
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pallas_hub.registry.server.names import check_repo_id
from pallas_hub.registry.server.protocol import HubError
from pallas_hub.registry.server.reading import Snapshot, list_refs, read_text, snapshot

if TYPE_CHECKING:
    from pallas_hub.registry.server.app import Settings

_MAX_SMALL_BODY = 8 * 2**20


def hub(request: Request) -> Settings:
    return request.app.state.hub


def param(request: Request, name: str, default: str = "") -> str:
    """A path parameter, decoded (the application matches on the encoded path)."""
    return unquote(request.path_params.get(name, default))


def repo_id_of(request: Request) -> str:
    return check_repo_id(param(request, "owner"), param(request, "name").removesuffix(".git"))


async def body_of(request: Request, limit: int = _MAX_SMALL_BODY) -> bytes:
    """The whole body in memory; HubError 413 above the limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HubError(413, f"the request body is larger than {limit} bytes.")
    return bytes(body)


async def json_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body; an empty body is an empty object. HubError 400 for anything else."""
    body = await body_of(request)
    return parse_json(body)


def parse_json(body: bytes) -> dict[str, Any]:
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except ValueError as error:
        raise HubError(400, f"the request body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise HubError(400, f"the request body must be a JSON object; got {type(value).__name__}.")
    return value


@contextmanager
def snapshot_of(request: Request, default: str = "main") -> Generator[Snapshot]:
    store = hub(request).store
    repo_id = repo_id_of(request)
    with store.open(repo_id) as repo:
        yield snapshot(repo, repo_id, param(request, "revision", default), store.sizes)


def front_page(request: Request) -> Response:
    repos = "\n".join(f"  {request.base_url}kernels/{repo_id}" for repo_id in hub(request).store.repo_ids())
    return PlainTextResponse(
        "pallas-hub: a Hub for kernel repos, for tests, air-gapped clusters and development.\n\n"
        f"Use it: export HF_ENDPOINT={str(request.base_url).rstrip('/')}\n\nRepos:\n{repos or '  none yet'}\n"
    )


def repo_page(request: Request) -> Response:
    """A repo at a commit (main by default), for people."""
    with snapshot_of(request) as snap:
        found = list_refs(snap.repo)
        names = ", ".join(ref["name"] for ref in found["branches"] + found["tags"])
        files = "\n".join(f"  {path.decode()}" for path in snap.files()) or "  none"
        return PlainTextResponse(
            f"{snap.repo_id}\n\ngit clone {request.base_url}kernels/{snap.repo_id}\nbranches and tags: {names}\n"
            f"commit: {snap.sha}\nfiles:\n{files}\n\n{read_text(snap, 'README.md') or ''}"
        )


def whoami(request: Request) -> Response:
    from pallas_hub.registry.server.app import has_token

    settings = hub(request)
    if settings.token is not None and not has_token(request, settings.token):
        raise HubError(401, "Invalid credentials in Authorization header")
    owners = sorted({repo_id.split("/")[0] for repo_id in settings.store.repo_ids()} | settings.trusted)
    return JSONResponse(
        {
            "type": "user",
            "name": "local",
            "fullname": "local user of a pallas-hub server",
            "orgs": [{"type": "org", "name": owner} for owner in owners],
            "auth": {"type": "access_token", "accessToken": {"displayName": "local", "role": "write"}},
        }
    )


def organization_overview(request: Request) -> Response:
    """Any name is an organisation here; the clients only want to know whether it is trusted."""
    owner = param(request, "owner")
    check_repo_id(owner, "any")
    return JSONResponse(
        {
            "name": owner,
            "fullname": owner,
            "avatarUrl": "",
            "trustedKernelPublisher": owner in hub(request).trusted,
        }
    )


async def validate_yaml(request: Request) -> Response:
    """The metadata block of a README.md: it must be a YAML mapping, if there is one."""
    content = str((await json_of(request)).get("content") or "")
    block = re.match(r"\s*---[ \t]*\r?\n(.*?)(?:^---[ \t]*\r?$|\Z)", content, re.DOTALL | re.MULTILINE)
    message = None
    if block:
        try:
            value = yaml.safe_load(block.group(1))
        except yaml.YAMLError as error:
            message = f"the metadata block of README.md is not valid YAML: {' '.join(str(error).split())}"
        else:
            if value is not None and not isinstance(value, dict):
                message = f"the metadata block of README.md must be a mapping; got {type(value).__name__}"
    if message:
        return JSONResponse({"errors": [{"message": message}], "warnings": []}, status_code=400)
    return JSONResponse({"errors": [], "warnings": []})


def list_repos(request: Request) -> Response:
    """All repos, or those of one `author`, or those whose id contains `search`."""
    author, search = request.query_params.get("author"), request.query_params.get("search", "")
    ids = [repo_id for repo_id in hub(request).store.repo_ids() if search.lower() in repo_id.lower()]
    found = [{"id": repo_id} for repo_id in ids if author is None or repo_id.split("/")[0] == author]
    return JSONResponse(found)


def repo_info(request: Request) -> Response:
    with snapshot_of(request) as snap:
        return JSONResponse(snap.info(with_blobs=_flag(request, "blobs")))


def refs(request: Request) -> Response:
    with hub(request).store.open(repo_id_of(request)) as repo:
        return JSONResponse(list_refs(repo))


def tree(request: Request) -> Response:
    with snapshot_of(request) as snap:
        entries = snap.tree(param(request, "path").strip("/"), recursive=_flag(request, "recursive"))
        return JSONResponse(entries, headers={"X-Repo-Commit": snap.sha})


async def paths_info(request: Request) -> Response:
    body = await body_of(request)
    if request.headers.get("content-type", "").startswith("application/json"):
        paths = parse_json(body).get("paths", [])
    else:
        paths = parse_qs(body.decode("utf-8", "replace")).get("paths", [])
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise HubError(400, "'paths' must be a list of strings.")

    def look_up() -> Response:
        with snapshot_of(request) as snap:
            entries = [snap.entry(path.strip("/")) for path in paths]
            return JSONResponse([entry for entry in entries if entry is not None])

    return await run_in_threadpool(look_up)


def commits(request: Request) -> Response:
    with snapshot_of(request) as snap:
        return JSONResponse(snap.history())


def resolve(request: Request) -> Response:
    """A file: the whole of it, its headers only (HEAD), or one range."""
    with snapshot_of(request) as snap:
        path = param(request, "path")
        blob = snap.blob(path)
        size = snap.size(blob)
        headers = {
            "X-Repo-Commit": snap.sha,
            "ETag": f'"{blob.decode()}"',
            "Accept-Ranges": "bytes",
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(path.rsplit('/', 1)[-1])}",
            "X-Content-Type-Options": "nosniff",
            "Content-Type": "application/octet-stream",
        }
        if request.method == "HEAD":
            return Response(headers={**headers, "Content-Length": str(size)})
        content = snap.content(blob)
    span = _range(request.headers.get("range"), size)
    if span is None:
        return Response(content, headers=headers)
    start, stop = span
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Response(content[start:stop], status_code=206, headers=headers)


def _range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, stop) of a single byte range; None: send all of it. HubError 416 if it lies outside."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip()) if header else None
    if match is None or match.groups() == ("", ""):
        return None  # no range, several ranges, or another unit: HTTP allows to answer with the whole
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        if first and last and int(last) < start:
            return None
        raise HubError(
            416,
            f"range {header!r} lies outside the {size} bytes of the file.",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return start, stop


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in ("1", "true")
