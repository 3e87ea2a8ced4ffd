"""Steps of the demo that have to do with the Hub: start one, publish to it, load from it."""

from __future__ import annotations

import os
from pathlib import Path

from pallas_hub.demo.state import KERNELS, ORGANISATION, Demo, Step, StepFailed, require

# Settings that would make the demo do something else than it says.
_UNSET = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "LOCAL_KERNELS",
    "KERNELS_CACHE",
    "DISABLE_KERNEL_MAPPING",
    "PALLAS_HUB_PATH",
    "PALLAS_HUB_INTERPRET",
    # With telemetry off, kernels 0.17.2 sends a header that no HTTP client accepts. The only Hub here is our own.
    "HF_HUB_DISABLE_TELEMETRY",
    "DISABLE_TELEMETRY",
    "DO_NOT_TRACK",
)


def start_hub(demo: Demo, step: Step) -> None:
    """Start a Hub on loopback, in a temporary folder"""
    from pallas_hub.registry.server import running_hub

    demo.url = demo.stack.enter_context(running_hub(demo.folder / "store", trusted=(ORGANISATION,))).url
    for name in _UNSET:
        os.environ.pop(name, None)
    os.environ["HF_ENDPOINT"] = demo.url
    os.environ["HF_HOME"] = str(demo.folder / "hf")
    os.environ["HF_HUB_CACHE"] = str(demo.folder / "hf" / "hub")
    os.environ["PALLAS_HUB_CACHE"] = str(demo.folder / "cache")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    step.facts["url"] = demo.url
    demo.say(f"      {demo.url}; HF_ENDPOINT and the caches point there for the rest of this process")


def publish_kernels(demo: Demo, step: Step) -> None:
    """Build both kernels and publish them"""
    from pallas_hub.registry.build import build
    from pallas_hub.registry.publish import publish

    for name in KERNELS:
        first, second = (build(name, demo.folder / place / name) for place in ("first", "second"))
        require(_bytes_of(first.path) == _bytes_of(second.path), f"{name}: two builds of the same source differ")
        done = publish(name, ORGANISATION, endpoint=demo.url, token="demo")
        if done.commit is None:
            raise StepFailed(f"{name}: nothing was published to an empty Hub")
        step.facts[name] = {"repo": done.repo_id, "branch": done.branch, "commit": done.commit, **first.digests}
        variants = ", ".join(sorted(first.digests))
        demo.say(f"      {done.repo_id} {done.branch}, commit {done.commit[:12]}: {variants}; built twice, same bytes")


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load_kernels(demo: Demo, step: Step) -> None:
    """Load them as a user does, with the kernels library and with pallas_hub"""
    import kernels

    import pallas_hub
    from pallas_hub.registry.errors import NotTrusted

    for name in KERNELS:
        repo = f"{ORGANISATION}/{name}"
        theirs = kernels.get_kernel(repo, version=1, trust_remote_code=True)
        demo.say(f"      kernels.get_kernel({repo!r}, version=1) -> {', '.join(theirs.__all__)}")
        try:
            ours = pallas_hub.get_kernel(repo)
        except NotTrusted:
            demo.say("      (these sources are not the released ones, so pallas_hub asks for consent; it is given)")
            ours = pallas_hub.get_kernel(repo, trust_remote_code=[repo])
        origin = pallas_hub.loaded_from(ours)
        require(origin.source == "hub", f"{repo} was loaded from {origin.source}, not from the Hub")
        commit = str(origin.commit)[:12]
        demo.say(f"      pallas_hub.get_kernel({repo!r}) -> v{origin.version}, {origin.variant}, commit {commit}")
        demo.say(f"        from the {origin.source}; trusted because: {origin.trust}")
        demo.kernels[name] = ours
        step.facts[name] = {"version": origin.version, "variant": origin.variant, "commit": origin.commit}
