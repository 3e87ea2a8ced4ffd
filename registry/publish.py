"""Push a kernel's build to its Hub repo, through huggingface_hub.

A version appears, or moves to a new build, in one step. A new version is committed to a staging branch first and named
`v<N>` only when it is whole; an existing one gets one commit on top. Whoever dies in between leaves the old state.
"""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any

from pallas_hub.registry import answers
from pallas_hub.registry.api import Api, changes, read_api
from pallas_hub.registry.build import repo_files
from pallas_hub.registry.errors import ApiChanged, HubUnavailable, ManifestError, PublishError
from pallas_hub.registry.paths import OUR_SOURCES, Sources, check_repo_id
from pallas_hub.registry.provenance import is_dirty
from pallas_hub.registry.record import check_recorded, freeze
from pallas_hub.registry.source import read_source
from pallas_hub.registry.static_check import parse_files

# What a user may add to the repo by hand on the Hub's website: not ours to delete.
_FOREIGN = (".gitattributes", ".gitignore")


@dataclass
class Published:
    """What `publish` did, or would do (`dry_run`). `commit` is None if nothing had to change or on a dry run."""

    repo_id: str
    version: int
    endpoint: str
    branch: str
    dry_run: bool
    commit: str | None = None
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    main_changed: list[str] = field(default_factory=list)
    released: bool = False
    not_compared: str = ""  # why a dry run could not ask the Hub what it holds already

    @property
    def up_to_date(self) -> bool:
        return not (self.added or self.changed or self.deleted or self.main_changed)


def publish(
    name: str,
    org: str | None = None,
    *,
    endpoint: str | None = None,
    dry_run: bool = False,
    token: str | None = None,
    private: bool = False,
    release: bool | None = None,
    sources: Sources = OUR_SOURCES,
) -> Published:
    """Build kernels/<name> and push it as version v<N> of its repo. Doing it again changes nothing.

    org        organisation to publish under, in place of the one in build.toml
    endpoint   Hub to publish to; default HF_ENDPOINT or huggingface.co
    token      default: HF_TOKEN or the token saved by `hf auth login`
    release    freeze the build in hub_manifests/; default: yes, unless the endpoint is on loopback

    Raises   ApiChanged: a published or recorded version would lose something.  ManifestError: the build is not
             recorded.  PublishError: the Hub refused.  HubUnavailable: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    source = read_source(name, sources)
    check_recorded(name, sources)
    files, api, digests = repo_files(source)
    repo_id = check_repo_id(f"{org}/{name}" if org else source.repo_id)
    client = HfApi(endpoint=endpoint.strip().rstrip("/") if endpoint else endpoint, token=token)
    done = Published(repo_id, source.version, client.endpoint, f"v{source.version}", dry_run)
    public = release if release is not None else not _is_loopback(client.endpoint)
    if public and is_dirty(source):
        raise PublishError(
            f"{name}: its sources have changes that are not committed, so no commit could tell users what they run. "
            "Commit them and publish again."
        )
    branches: dict[str, str] = {}
    try:
        branches = _compare(client, done, files, api)
    except HubUnavailable as error:
        if not dry_run:
            raise
        done.added, done.not_compared = sorted(files), str(error)
    if dry_run:
        return done
    with _words(repo_id, client.endpoint):
        if not branches:
            client.create_repo(repo_id, repo_type="kernel", private=private, exist_ok=True)
            branches = _branches(client, repo_id)
        _push(client, done, files, branches)
    if public:
        done.released = _freeze(done, name, digests, sources)
    return done


def _freeze(done: Published, name: str, digests: dict[str, str], sources: Sources) -> bool:
    try:
        return freeze(name, done.version, digests, sources)
    except OSError as error:
        raise ManifestError(
            f"{name}: published, but its manifest in {sources.manifests} cannot be written ({error}). "
            "Publish again from a checkout, which pushes nothing and marks the build as released."
        ) from error


def _branches(client: Any, repo_id: str) -> dict[str, str]:
    """Branch -> commit; empty if there is no such repo."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        refs = client.list_repo_refs(repo_id, repo_type="kernel")
    except RepositoryNotFoundError:
        return {}
    return {branch.name: branch.target_commit for branch in refs.branches}


def _compare(client: Any, done: Published, files: dict[str, bytes], api: Api) -> dict[str, str]:
    """Fill in what differs from what the Hub holds; return its branches."""
    with _words(done.repo_id, client.endpoint):
        branches = _branches(client, done.repo_id)
        there = _hashes(client, done.repo_id, branches.get(done.branch))
        done.added = sorted(path for path in files if path not in there)
        done.changed = sorted(path for path, data in files.items() if path in there and not _same(data, there[path]))
        done.deleted = sorted(path for path in there if path not in files and path not in _FOREIGN)
        if done.branch in branches:
            _refuse_api_change(client, done, api, branches[done.branch])
        done.main_changed = _main_changes(client, done.repo_id, files, branches, done.version)
    return branches


def _hashes(client: Any, repo_id: str, commit: str | None) -> dict[str, str]:
    """Path -> git blob id, or sha256 for files in LFS, of a commit."""
    if commit is None:
        return {}
    entries = client.list_repo_tree(repo_id, repo_type="kernel", revision=commit, recursive=True)
    return {
        entry.path: entry.lfs.sha256 if getattr(entry, "lfs", None) else entry.blob_id
        for entry in entries
        if hasattr(entry, "blob_id")
    }


def _same(data: bytes, known: str) -> bool:
    if len(known) == 64:
        return sha256(data).hexdigest() == known
    return sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == known


def _main_changes(client: Any, repo_id: str, files: dict, branches: dict[str, str], version: int) -> list[str]:
    """Files of `main` to write: it shows the card of the newest version and holds no builds."""
    versions = [int(branch[1:]) for branch in branches if branch[:1] == "v" and branch[1:].isdecimal()]
    if version < max(versions, default=0):
        return []
    there = _hashes(client, repo_id, branches.get("main"))
    return [path for path in ("LICENSE", "README.md") if path not in there or not _same(files[path], there[path])]


def _push(client: Any, done: Published, files: dict[str, bytes], branches: dict[str, str]) -> None:
    message = f"{done.repo_id.split('/')[1]} {done.branch}"
    if done.added or done.changed or done.deleted:
        if done.branch in branches:
            head = branches[done.branch]
            done.commit = _commit(client, done, done.branch, head, files, message)
        else:
            done.commit = _push_new_version(client, done, files, branches, message)
    if done.main_changed:
        from huggingface_hub import CommitOperationAdd

        operations = [CommitOperationAdd(path, files[path]) for path in done.main_changed]
        main = {"repo_type": "kernel", "revision": "main"}
        client.create_commit(done.repo_id, operations, commit_message=f"Card of {message}", **main)


def _push_new_version(client: Any, done: Published, files: dict, branches: dict[str, str], message: str) -> str:
    staging = f"staging-{done.branch}"
    where = {"repo_id": done.repo_id, "repo_type": "kernel"}
    if staging in branches:  # left by a publish that was interrupted
        client.delete_branch(**where, branch=staging)
    client.create_branch(**where, branch=staging, revision="main")
    head = _branches(client, done.repo_id)[staging]
    there = _hashes(client, done.repo_id, head)
    stale = [path for path in there if path not in files and path not in _FOREIGN]
    commit = _commit(client, done, staging, head, files, message, stale)
    client.create_branch(**where, branch=done.branch, revision=commit)
    client.delete_branch(**where, branch=staging)
    return commit


def _commit(
    client: Any, done: Published, branch: str, head: str, files: dict, message: str, stale: list | None = None
) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    deleted = done.deleted if stale is None else stale
    operations: list = [CommitOperationAdd(path, files[path]) for path in done.added + done.changed]
    operations += [CommitOperationDelete(path, is_folder=False) for path in deleted]
    info = client.create_commit(
        done.repo_id,
        operations,
        commit_message=message,
        repo_type="kernel",
        revision=branch,
        parent_commit=head,
    )
    return info.oid


def _refuse_api_change(client: Any, done: Published, api: Api, commit: str) -> None:
    """Read the API of what the repo holds under this version, without running it, and compare."""
    published = _published_api(client, done, commit)
    if published is None:
        return
    lost = changes(published, api)
    if lost:
        raise ApiChanged(
            f"{done.repo_id}: version {done.version} on {done.endpoint} has another public API: "
            f"{'; '.join(lost)}. Whatever a "
            f"published version holds stays in it; publish this one as version {done.version + 1} (version "
            "in build.toml)."
        )


def _published_api(client: Any, done: Published, commit: str) -> Api | None:
    entries = client.list_repo_tree(done.repo_id, repo_type="kernel", revision=commit, recursive=True)
    builds = sorted({entry.path.split("/")[1] for entry in entries if entry.path.startswith("build/")})
    if not builds:
        return None
    with tempfile.TemporaryDirectory() as root:  # not the user's cache: this is data to compare, not a kernel to load
        client.snapshot_download(
            done.repo_id,
            repo_type="kernel",
            revision=commit,
            allow_patterns=[f"build/{builds[0]}/*.py"],
            local_dir=root,
        )
        folder = Path(root) / "build" / builds[0]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}
    if "__init__.py" not in files:
        raise PublishError(
            f"{done.repo_id}: branch {done.branch} holds another kind of kernel (no build/{builds[0]}/__init__.py); "
            "publish under another name or organisation."
        )
    return read_api(done.repo_id, parse_files(done.repo_id, files))


@contextmanager
def _words(repo_id: str, endpoint: str) -> Generator[None]:
    """Turn the client's errors into ones that name the cause and the mend."""
    from huggingface_hub.errors import HfHubHTTPError

    kept = "What was published before is untouched."
    try:
        with answers.no_endless_wait():
            yield
    except HfHubHTTPError as error:
        status, said = error.response.status_code, answers.refusal(error)
        if status in (401, 403):
            text = f"not allowed to write on {endpoint} ({said}). Log in with a token that may write to the "
            raise PublishError(f"{repo_id}: {text}organisation: hf auth login, or HF_TOKEN=... {kept}") from error
        if status in (409, 412):  # a branch appeared, or moved, since we looked
            raise PublishError(f"{repo_id}: somebody else pushed at the same time; publish again. {kept}") from error
        if status == 507:
            raise PublishError(f"{repo_id}: no room left on {endpoint} ({said}). {kept}") from error
        raise PublishError(f"{repo_id}: {endpoint} answered {said}. {kept}") from error
    except Exception as error:
        if answers.unreachable(error):
            kept = f" {kept} Publish again to go on where this ended."
            raise answers.unavailable(repo_id, error, where=endpoint, kept=kept) from error
        if unsent := answers.unsendable(repo_id, error, endpoint):
            raise unsent from error
        raise


def _is_loopback(endpoint: str) -> bool:
    from urllib.parse import urlsplit

    return (urlsplit(endpoint).hostname or "") in ("localhost", "127.0.0.1", "::1")
