"""Handlers that change a repo, and the question that comes before an upload."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from io import BytesIO
from typing import IO, TypeVar

import anyio.to_thread
from dulwich.ignore import IgnoreFilter, read_ignore_patterns
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pallas_hub.registry.server import writing
from pallas_hub.registry.server.names import check_file_path, check_repo_id
from pallas_hub.registry.server.protocol import HubError
from pallas_hub.registry.server.reading import Snapshot, read_text
from pallas_hub.registry.server.routes_read import hub, json_of, param, repo_id_of, snapshot_of

T = TypeVar("T")
_IN_MEMORY = 4 * 2**20  # larger commit requests are received into a file of the store


async def _write(request: Request, change: Callable[[], T]) -> T:
    """Run a change in a writer's thread, also to its end when the client hangs up."""
    return await anyio.to_thread.run_sync(change, limiter=hub(request).writers)


async def create_repo(request: Request) -> Response:
    body = await json_of(request)
    kind = body.get("type") or "model"
    if kind != "kernel":
        raise HubError(400, f'this server holds repos of type "kernel" only; got {kind!r}. Pass repo_type="kernel".')
    if body.get("private") or body.get("visibility") not in (None, "public"):
        raise HubError(400, "this server has no private repos: whoever reaches it may read. Leave `private` out.")
    repo_id = check_repo_id(body.get("organization"), body.get("name"))
    url = f"{request.base_url}kernels/{repo_id}"
    try:
        await _write(request, lambda: hub(request).store.create(repo_id))
    except HubError as error:
        if error.status == 409:
            error.body = {"url": url}  # the clients read it when asked not to mind an existing repo
        raise
    return JSONResponse({"url": url, "name": repo_id})


async def delete_repo(request: Request) -> Response:
    body = await json_of(request)
    repo_id = check_repo_id(body.get("organization"), body.get("name"))
    if (body.get("type") or "model") != "kernel":
        raise HubError(404, f'{repo_id} can only be deleted with repo_type="kernel".', "RepoNotFound")
    await _write(request, lambda: hub(request).store.delete(repo_id))
    return JSONResponse({})


async def create_branch(request: Request) -> Response:
    start = str((await json_of(request)).get("startingPoint") or "main")
    store, repo_id = hub(request).store, repo_id_of(request)

    def change() -> None:
        with store.open_for_writing(repo_id) as repo:
            writing.create_branch(repo, repo_id, param(request, "branch"), start, store.sizes)

    await _write(request, change)
    return JSONResponse({})


async def delete_branch(request: Request) -> Response:
    return await _delete_ref(request, "branch", param(request, "branch"))


async def create_tag(request: Request) -> Response:
    body = await json_of(request)
    message = body.get("message")
    store, repo_id = hub(request).store, repo_id_of(request)

    def change() -> None:
        with store.open_for_writing(repo_id) as repo:
            revision = param(request, "revision")
            writing.create_tag(repo, repo_id, body.get("tag"), revision, str(message or ""), store.sizes)

    await _write(request, change)
    return JSONResponse({})


async def delete_tag(request: Request) -> Response:
    return await _delete_ref(request, "tag", param(request, "revision"))


async def _delete_ref(request: Request, kind: str, name: str) -> Response:
    store, repo_id = hub(request).store, repo_id_of(request)

    def change() -> None:
        with store.open_for_writing(repo_id) as repo:
            writing.delete_ref(repo, repo_id, kind, name)

    await _write(request, change)
    return JSONResponse({})


async def preupload(request: Request) -> Response:
    """How each file is to be sent. Always "regular": inside the commit request, stored in git."""
    body = await json_of(request)
    files = body.get("files")
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise HubError(400, "'files' must be a list of {path, sample, size}.")
    limit = hub(request).max_commit_bytes
    for file in files:
        check_file_path(file.get("path"))
        # Refused here, before the client has sent anything. Content travels as base64: 4 bytes for 3.
        size = file.get("size")
        if isinstance(size, int) and size * 4 // 3 > limit:
            raise too_large(limit, f"file {file['path']!r} has {size} bytes, {size * 4 // 3} in transfer")

    paths = [str(file["path"]) for file in files]

    def look_up() -> Response:
        with snapshot_of(request) as snap:
            ignored = _ignore_filter(snap, body.get("gitIgnore"))
            return JSONResponse({"files": [_upload_mode(snap, ignored, path) for path in paths]})

    return await run_in_threadpool(look_up)


def _upload_mode(snap: Snapshot, ignored: IgnoreFilter, path: str) -> dict[str, object]:
    answer: dict[str, object] = {
        "path": path,
        "uploadMode": "regular",
        "shouldIgnore": _is_ignored(ignored, path),
    }
    entry = snap.entry(path)
    if entry is not None and entry["type"] == "file":
        answer["oid"] = entry["oid"]  # the client leaves the file out if it has the same content
    return answer


def _ignore_filter(snap: Snapshot, sent: object) -> IgnoreFilter:
    """The .gitignore among the files to upload, or else the one in the repo."""
    text = sent if isinstance(sent, str) else read_text(snap, ".gitignore") or ""
    return IgnoreFilter(read_ignore_patterns(BytesIO(text.encode("utf-8", "replace"))))


def _is_ignored(ignored: IgnoreFilter, path: str) -> bool:
    parts = path.split("/")
    folders = ["/".join(parts[:depth]) + "/" for depth in range(1, len(parts))]
    return any(ignored.is_ignored(candidate) for candidate in [*folders, path])


async def commit(request: Request) -> Response:
    if request.query_params.get("create_pr"):
        raise HubError(400, "this server has no pull requests; commit to a branch.")
    store, repo_id = hub(request).store, repo_id_of(request)
    branch = param(request, "revision")

    def change(body: IO[bytes]) -> str:
        with store.open_for_writing(repo_id) as repo:
            return writing.commit(repo, repo_id, branch, body, store.sizes)

    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY, dir=str(store.tmp)) as body:
        try:
            await _receive(request, body, hub(request).max_commit_bytes)
        except OSError as error:
            raise store.room_error(error, f"{repo_id} is as before") from error
        sha = await _write(request, lambda: change(body))
    url = f"{request.base_url}kernels/{repo_id}/commit/{sha}"
    return JSONResponse({"success": True, "commitOid": sha, "commitUrl": url})


async def _receive(request: Request, body: IO[bytes], limit: int) -> None:
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        # Read to the end even when it is too much: a client that is still sending does not hear an answer.
        if received <= limit:
            body.write(chunk)
        elif received > 8 * limit:
            break
    if received > limit:
        raise too_large(limit, f"this one has {received} bytes")
    body.seek(0)


def too_large(limit: int, what: str) -> HubError:
    return HubError(
        413,
        f"a commit request may have at most {limit} bytes (files grow by a third in transfer); {what}. Split "
        "it into several commits, or start the server with a larger --max-commit-mb.",
    )
