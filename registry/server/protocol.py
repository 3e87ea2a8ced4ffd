"""What the clients read: errors with X-Error-Code, dates, tree entries, revisions as they appear in a URL."""

from __future__ import annotations

import time

from starlette.responses import JSONResponse, Response


class HubError(Exception):
    """An error for the client: status, X-Error-Message and, where clients tell cases apart, X-Error-Code."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        body: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}
        self.body = body or {}

    def response(self) -> Response:
        headers = {**self.headers, "X-Error-Message": header_text(self.message)}
        if self.code:
            headers["X-Error-Code"] = self.code
        return JSONResponse({"error": self.message, **self.body}, status_code=self.status, headers=headers)


def header_text(text: str) -> str:
    """`text` as an HTTP header value: one line, latin-1, not longer than proxies commonly accept."""
    return " ".join(text.split()).encode("latin-1", "replace").decode("latin-1")[:1000]


def repo_not_found(repo_id: str) -> HubError:
    return HubError(404, f"repository {repo_id} does not exist on this server.", "RepoNotFound")


def revision_not_found(repo_id: str, revision: str) -> HubError:
    return HubError(404, f"revision {revision!r} does not exist in {repo_id}.", "RevisionNotFound")


def entry_not_found(repo_id: str, path: str, commit: str) -> HubError:
    # With X-Repo-Commit the client can cache that the file is absent from this very commit.
    return HubError(
        404, f"{path!r} does not exist in {repo_id} at {commit}.", "EntryNotFound", {"X-Repo-Commit": commit}
    )


def iso_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
