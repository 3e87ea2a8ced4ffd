"""What the Hub's clients raise, in words that name the cause and the mend; and a limit to how long they wait."""

import errno
import json
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pallas_hub.registry.errors import HubUnavailable, LoadError, PallasHubError, UnknownKernel, UnknownVersion
from pallas_hub.registry.hub import cache_folder, endpoint

# Seconds to wait for the answer to a write: the Hub checks and stores a whole commit before it answers.
WRITE_TIMEOUT_S = 120.0

# httpx errors about a request that could not even be sent: a wrong HF_ENDPOINT, not a Hub that is down.
_UNSENDABLE = ("LocalProtocolError", "UnsupportedProtocol", "InvalidURL", "UnicodeEncodeError")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
_MENDS = {
    401: "Log in again (hf auth login), or unset HF_TOKEN.",
    403: "Ask its owners for access, or log in with another token (hf auth login).",
    404: "HF_ENDPOINT must be the address of a Hub.",
    407: "Check HTTP_PROXY and HTTPS_PROXY.",
}

_limited: ContextVar[bool] = ContextVar("_limited", default=False)


@contextmanager
def no_endless_wait() -> Generator[None]:
    """Give requests of huggingface_hub that set no timeout one, in this context only.

    It sets none for most of what it asks before a download, so a Hub that accepts and never answers would hang us.
    """
    from huggingface_hub.utils import get_session

    session: Any = get_session()
    hooks = session.event_hooks
    if _set_timeout not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _set_timeout]}
    token = _limited.set(True)
    try:
        yield
    finally:
        _limited.reset(token)


def _set_timeout(request: Any) -> None:
    from huggingface_hub import constants

    timeouts = request.extensions.get("timeout", {})
    if not _limited.get() or any(value is not None for value in timeouts.values()):
        return
    wait = float(constants.HF_HUB_ETAG_TIMEOUT)
    answer = wait if request.method in ("GET", "HEAD") else max(wait, WRITE_TIMEOUT_S)
    request.extensions["timeout"] = {"connect": wait, "read": answer, "write": answer, "pool": answer}


def unreachable(error: BaseException | None) -> bool:
    """True if `error` means that no Hub answered, as opposed to one answering no."""
    while error is not None:
        if type(error).__name__ in _UNSENDABLE:
            return False
        if isinstance(error, ConnectionError | TimeoutError) or _is_nonsense(error):
            return True
        if any(kind.__name__ == "TransportError" for kind in type(error).__mro__):  # httpx's family of network errors
            return True
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status == 429 or status >= 500:
            return True
        error = error.__cause__
    return False


def unavailable(repo_id: str, error: BaseException, *, where: str | None = None, kept: str = "") -> HubUnavailable:
    """The error for what `unreachable` accepts. `kept` says what the failure left alone; reading leaves all."""
    where = where or endpoint()
    if _is_offline_by_wish(error):
        return HubUnavailable(f"{repo_id}: HF_HUB_OFFLINE=1, so {where} was not asked. Unset it first.{kept}")
    mend = "" if kept else ", or set HF_HUB_OFFLINE=1 to use the cache alone"
    if _is_nonsense(error):
        what = (
            f"{where} answers, but not as a Hub does ({_said(error)}). A login page or a proxy may answer in its place"
        )
        return HubUnavailable(f"{repo_id}: {what}. Check the network and the address of the Hub{mend}.{kept}")
    what = f"the Hub at {where} cannot be reached ({type(error).__name__}: {_said(error)})"
    return HubUnavailable(f"{repo_id}: {what}. Check the network and the address of the Hub{mend}.{kept}")


def unsendable(repo_id: str, error: BaseException, where: str | None = None) -> LoadError | None:
    """The error for a request that could not be sent, else None."""
    if type(error).__name__ not in _UNSENDABLE:
        return None
    return LoadError(
        f"{repo_id}: cannot ask {where or endpoint()}: {_said(error)}. HF_ENDPOINT must be a URL, with http(s)://, "
        "and HF_TOKEN plain ASCII."
    )


def refusal(error: Any) -> str:
    """What the Hub answered, in one line without a full stop: status, address and its own words."""
    response = error.response
    said = f"{response.status_code} {response.reason_phrase} for {response.url}"
    own = getattr(error, "server_message", None)
    return f"{said}: {_one_line(own)}" if own else said


@contextmanager
def plain_errors(repo_id: str) -> Generator[None]:
    """Turn what the Hub's clients raise while reading into errors that name the cause and the mend."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        with no_endless_wait():
            yield
    except PallasHubError:
        raise
    except GatedRepoError as error:
        raise UnknownKernel(f"{repo_id}: you have no access to this gated repo; ask for it on the Hub.") from error
    except RepositoryNotFoundError as error:
        private = "or it is private and you gave no token (hf auth login)"
        raise UnknownKernel(f"{repo_id}: no kernel repo of that name on {endpoint()}, {private}.") from error
    except RevisionNotFoundError as error:
        raise UnknownVersion(f"{repo_id} has no such revision on {endpoint()}: {refusal(error)}.") from error
    except Exception as error:
        if unreachable(error):
            raise unavailable(repo_id, error) from error
        if unsent := unsendable(repo_id, error):
            raise unsent from error
        if isinstance(error, HfHubHTTPError):
            mend = _MENDS.get(error.response.status_code, "Check HF_ENDPOINT.")
            raise LoadError(f"{repo_id}: {endpoint()} refused: {refusal(error)}. {mend}") from error
        if isinstance(error, OSError):
            raise _about_the_cache(repo_id, error) from error
        if isinstance(error, ValueError):  # the kernels library, about metadata.json or a cycle of dependencies
            text = f"{repo_id}: {_said(error)}."
            if "metadata" in text:
                text += f" Fetch it again (pallas-hub download {repo_id} --force); if that does not help, its "
                text += "publisher has to repair it."
            raise LoadError(text) from error
        raise


def _about_the_cache(repo_id: str, error: OSError) -> BaseException:
    """Reading from the Hub writes to its cache and to nothing else."""
    mend = "or point HF_HUB_CACHE to another folder."
    folder = cache_folder(repo_id)
    if error.errno in _NO_ROOM:
        return LoadError(f"{repo_id}: no room left in {folder}; nothing was loaded. Free some space, {mend}")
    if error.errno in _NOT_WRITABLE:
        why = f"{error.strerror}: {error.filename}"
        return LoadError(f"{repo_id}: the cache {folder} cannot be written ({why}). Make it writable, {mend}")
    text = f"{repo_id}: {_one_line(str(error))}."
    if "Consistency check failed" in text:  # huggingface_hub: not as many bytes as announced; the file is not kept
        text += " The download was cut short, by the Hub or by a proxy. Try again."
    return LoadError(text)


def _is_offline_by_wish(error: BaseException | None) -> bool:
    while error is not None and type(error).__name__ != "OfflineModeIsEnabled":
        error = error.__cause__
    return error is not None


def _is_nonsense(error: BaseException) -> bool:
    """True if huggingface_hub could not make sense of an answer: a web page, a redirect in circles, other JSON."""
    if type(error).__name__ == "TooManyRedirects":
        return True
    if not isinstance(error, json.JSONDecodeError | KeyError | IndexError | TypeError | AttributeError):
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(str(module).startswith("huggingface_hub.") for module in modules)


def _said(error: BaseException) -> str:
    if getattr(error, "response", None) is not None:
        return refusal(error)
    if isinstance(error, KeyError | IndexError | TypeError | AttributeError):
        return f"{type(error).__name__}: {_one_line(str(error))}"
    return _one_line(str(error))


def _one_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[0].rstrip(" .:")
