"""Which kernel serves which kind of layer, and the one place that loads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

NORM = "RMSNorm"
EXPERTS = "experts"
ATTENTION = "attention"
ROUTER = "router"
DEFAULT_REPOS = {
    NORM: "pallas-hub/rms-norm",
    EXPERTS: "pallas-hub/moe-experts",
    ATTENTION: "pallas-hub/flash-attention",
    ROUTER: "pallas-hub/moe-experts",
}

Loader = Callable[[str, "int | None"], ModuleType]


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel and where it came from."""

    repo_id: str
    version: int | None
    source: str | None
    module: Any = field(compare=False, repr=False)  # None if it is not loaded

    def __deepcopy__(self, memo: dict) -> Kernel:
        return self  # modules cannot be copied, and a copy of a model runs the same kernel

    def __reduce__(self):
        # A pickle holds the names only: whoever loads it kernelizes again and says which kernel.
        return (Kernel, (self.repo_id, self.version, self.source, None))


KernelChoice = Mapping[str, "str | ModuleType | None"] | Iterable[str] | None


def choose_kernels(kernels: KernelChoice) -> dict[str, str | ModuleType]:
    """Kind of layer -> "org/name", "org/name@version" or a loaded kernel module.

    None means the default for every kind; a list names the kinds to swap; a dict chooses kernels, where None
    leaves a kind alone and kinds that it does not name keep their default.
    """
    if kernels is None:
        return dict(DEFAULT_REPOS)
    if isinstance(kernels, str):
        kernels = [kernels]
    unknown = [kind for kind in kernels if kind not in DEFAULT_REPOS]
    if unknown:
        raise ValueError(
            f"kernelize: kernels names kinds of layers, each one of {', '.join(DEFAULT_REPOS)}; "
            f'got {unknown[0]!r}. To choose a kernel, write {{"{NORM}": "org/name@1"}}.'
        )
    if not isinstance(kernels, Mapping):
        return {kind: DEFAULT_REPOS[kind] for kind in kernels}
    chosen = {**DEFAULT_REPOS, **kernels}
    return {kind: choice for kind, choice in chosen.items() if choice is not None}


def load_kernel(choice: str | ModuleType) -> Kernel:
    """The kernel behind a choice. A module is taken as it is."""
    if isinstance(choice, ModuleType):
        repo_id, version, source = _provenance(choice)
        return Kernel(repo_id or choice.__name__, version, source or "module", choice)
    repo_id, version = parse_choice(choice)
    module = _LOADER.get()(repo_id, version)
    _, found_version, source = _provenance(module)
    return Kernel(repo_id, found_version if found_version is not None else version, source, module)


def parse_choice(choice: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(?P<repo>[\w.-]+/[\w.-]+)(@v?(?P<version>\d+))?", choice)
    if match is None:
        raise ValueError(f'kernelize: a kernel is "org/name" or "org/name@version"; got {choice!r}.')
    return match["repo"], None if match["version"] is None else int(match["version"])


@contextmanager
def use_loader(loader: Loader) -> Generator[None]:
    """Load kernels with `loader(repo_id, version)` inside the block, instead of with pallas_hub.get_kernel."""
    token = _LOADER.set(loader)
    try:
        yield
    finally:
        _LOADER.reset(token)


def path_of(kernel: Kernel, device: Any) -> str | None:
    """The path a call of this kernel takes now for tensors on `device`, or None if the kernel does not say."""
    import torch

    if kernel.module is None:
        return None
    somewhere = SimpleNamespace(device=torch.device(device))  # no tensor: allocating one would start the device
    for holder in (getattr(kernel.module, "op", None), kernel.module):
        for value in vars(holder).values() if holder is not None else ():
            path_for = getattr(value, "path_for", None)
            if callable(path_for) and not isinstance(value, type):
                return str(path_for(somewhere))
    return None


def _load_from_hub(repo_id: str, version: int | None) -> ModuleType:
    from pallas_hub.registry.load import get_kernel  # imports torch

    return get_kernel(repo_id, version=version)


def _provenance(module: ModuleType) -> tuple[str | None, int | None, str | None]:
    """(repo id, version, source) as the registry knows them; Nones for a kernel that came another way."""
    from pallas_hub.registry.errors import LoadError
    from pallas_hub.registry.importer import loaded_from

    try:
        origin = loaded_from(module)
    except LoadError:
        return None, None, None
    return origin.repo_id, origin.version, origin.source


_LOADER: ContextVar[Loader] = ContextVar("pallas_hub_loader", default=_load_from_hub)
