"""The Hub, the cache and the variables that change what is loaded and which path runs."""

from __future__ import annotations

import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from pallas_hub.doctor.finding import Finding

SECTION = "hub"
DEFAULT_ENDPOINT = "https://huggingface.co"
REACH_TIMEOUT_S = 4.0
LOW_SPACE = 1 * 2**30
NO_SPACE = 50 * 2**20
_TELEMETRY_OFF = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
_TRUE = {"1", "true", "yes", "on"}

Reach = Callable[[str], "str | None"]


def check_hub(environ: Mapping[str, str] | None = None, reach: Reach | None = None) -> list[Finding]:
    environ = os.environ if environ is None else environ
    return [check_endpoint(environ, reach or reach_endpoint), *map(check_folder, cache_folders(environ).items())]


def is_offline(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def check_endpoint(environ: Mapping[str, str], reach: Reach) -> Finding:
    endpoint = environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    if is_offline(environ):
        words = "offline as asked (HF_HUB_OFFLINE): only the cache and the bundled copies are used"
        return Finding(SECTION, "endpoint", endpoint, "ok", words)
    problem = reach(endpoint)
    if problem is None:
        return Finding(SECTION, "endpoint", endpoint, "ok", "reachable")
    if environ.get("HF_ENDPOINT"):
        mend = "start the Hub (`pallas-hub serve --store DIR`), correct HF_ENDPOINT, or unset it"
        return Finding(
            SECTION, "endpoint", endpoint, "broken", f"HF_ENDPOINT is set and does not answer: {problem}", mend
        )
    words = f"not reachable: {problem}. Kernels come from the cache or from the copies bundled with pallas-hub"
    return Finding(SECTION, "endpoint", endpoint, "note", words, "set HF_HUB_OFFLINE=1 to skip the attempt each time")


def reach_endpoint(endpoint: str) -> str | None:
    """None when a web server answers, whatever it answers; otherwise what went wrong."""
    if not endpoint.startswith(("http://", "https://")):
        return "it must be a URL, with http:// or https://"
    try:
        request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "pallas-hub doctor"})
        with urllib.request.urlopen(request, timeout=REACH_TIMEOUT_S):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    except http.client.HTTPException as error:
        return f"it does not speak HTTP ({type(error).__name__})"


def cache_folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """The folders that downloads and builds go to, by the rules of the libraries that use them."""
    home = Path(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # as it is where there is no home
    hf_home = Path(environ.get("HF_HOME") or home / "huggingface")
    hub = environ.get("KERNELS_CACHE") or environ.get("HF_HUB_CACHE") or hf_home / "hub"
    own = environ.get("PALLAS_HUB_CACHE") or home / "pallas-hub"
    return {name: Path(os.path.expanduser(path)) for name, path in (("Hub cache", hub), ("pallas-hub cache", own))}


def check_folder(named: tuple[str, Path]) -> Finding:
    """Can files be made there, and is there room?"""
    name, folder = named
    present = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=present, prefix=".pallas-hub-doctor-"):
            pass
    except OSError as error:
        where = "HF_HUB_CACHE" if name == "Hub cache" else "PALLAS_HUB_CACHE"
        mend = f"make {present} a writable folder, or set {where} to one"
        return Finding(SECTION, name, str(folder), "broken", f"not writable: {error.strerror or error}", mend)
    free = shutil.disk_usage(present).free
    words = f"writable, {free / 2**30:.1f} GiB free"
    if free < NO_SPACE:
        return Finding(SECTION, name, str(folder), "broken", words, f"free some space under {present}")
    return Finding(SECTION, name, str(folder), "note" if free < LOW_SPACE else "ok", words)


def check_telemetry(environ: Mapping[str, str], kernels: str | None) -> list[Finding]:
    """kernels 0.17.2 leaves part of its User-Agent empty when telemetry is off, and HTTP clients refuse the header."""
    if kernels is None or not kernels.startswith("0.17."):
        return []
    names = [name for name in _TELEMETRY_OFF if environ.get(name, "").lower() in _TRUE]
    words = (
        f"with it, kernels.get_kernel and the kernels command of kernels {kernels} fail with 'Illegal header value'; "
    )
    words += "pallas_hub.get_kernel works all the same"
    mend = "unset it where the kernels library is used directly"
    return [Finding("variables", name, environ[name], "note", words, mend) for name in names]


def check_variables(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Variables that are set and change what happens. None set, no findings."""
    environ = os.environ if environ is None else environ
    meanings = {
        "HF_HUB_OFFLINE": "nothing is downloaded" if is_offline(environ) else "downloads are allowed",
        "LOCAL_KERNELS": "the kernels library takes these repos from local folders, without asking for trust",
        "DISABLE_KERNEL_MAPPING": "kernels.kernelize leaves layers alone when this is 1",
        "JAX_PLATFORMS": "jax uses only these platforms",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "torch loads no device backend such as torch_tpu by itself when this is 0",
    }
    found = [
        Finding("variables", name, environ[name], "ok", words) for name, words in meanings.items() if environ.get(name)
    ]
    if environ.get("PALLAS_HUB_INTERPRET", "0") not in ("", "0"):
        words = "kernels on CPU tensors run the interpreted Pallas kernel: right, but thousands of times slower"
        found.append(Finding("variables", "PALLAS_HUB_INTERPRET", environ["PALLAS_HUB_INTERPRET"], "note", words))
    if environ.get("PALLAS_HUB_PATH"):
        words = "every kernel is forced onto this path (auto, pallas, torch, jax, interpret)"
        found.append(Finding("variables", "PALLAS_HUB_PATH", environ["PALLAS_HUB_PATH"], "note", words))
    return found
