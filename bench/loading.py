"""Where the measured kernel comes from: the Hub like any user's, or the source folder of this checkout."""

from __future__ import annotations

import importlib
from typing import Any


def load_kernel(name: str, repo: str | None = None, source: bool = False) -> tuple[Any, str]:
    """Return the kernel module and one line that says where it came from.

    `source=True` builds and loads kernels/<name> as it is now; otherwise `pallas_hub.get_kernel` loads `repo`
    or pallas-hub/<name>, as for any user.
    """
    from pallas_hub.registry.load import get_kernel, load_source, loaded_from

    kernel = load_source(name) if source else get_kernel(repo or f"pallas-hub/{name}")
    return kernel, str(loaded_from(kernel))


def record_paths_of(kernel: Any) -> Any:
    """`record_paths` of the bridge inside this kernel (each build has its own); None without a bridge."""
    try:
        return importlib.import_module(f"{kernel.__name__}._bridge").record_paths
    except (ImportError, AttributeError):
        return None
