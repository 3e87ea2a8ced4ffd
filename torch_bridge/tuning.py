"""Block sizes that `pallas-hub tune` found, for a kernel about to be launched. Needs neither torch nor JAX.

    tuning/*.json beside the kernel's code:
    {"kernel": "ragged-dot", "device": "TPU v6 lite", ..., "entries": [
        {"when": {"op": "forward", "dtype": "bfloat16", "m": 512, "k": 2048}, "use": {fields of the kernel's Config}}]}

The blocks of the same shape are taken, else those of the nearest one, else the default. The kernel adapts and checks
them (`adapt`), so no file can take it over its VMEM limit; and a file that is missing, broken or not for this kernel
is never an error. Which blocks a launch has is logged by `logging.getLogger("...tuning")` at DEBUG.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

FAR = 2  # a tuned shape stands for others up to this factor away in every size
LARGEST_FILE = 1 << 24

log = logging.getLogger(__name__)
Config = TypeVar("Config")
Sizes = Mapping[str, Any]  # names (op, dtype; strings or bools) and sizes (positive ints) of a launch


def look_up(
    kernel: str,
    folder: Path,
    device_kind: str | None,
    when: Sizes,
    default: Config,
    adapt: Callable[[Config, Sizes], Config | None],
) -> Config:
    """The tuned blocks nearest to `when` on that device, or `default`: never a failure.

    `default` is a dataclass of positive ints. `adapt(config, tuned)` makes a config found at the sizes `tuned` fit
    these, or says None. Names have to be equal; the nearest shape is the one with the least product of size ratios.
    """
    entries = read_entries(kernel, folder).get(device_kind or "", ())
    near = [(distance, i) for i, entry in enumerate(entries) if (distance := _distance(entry["when"], when))]
    for _, i in sorted(near):
        config = _config(entries[i]["use"], default)
        if config is not None and (adapted := adapt(config, entries[i]["when"])) is not None:
            log.debug("%s: %s on %s: tuned at %s: %s", kernel, when, device_kind, entries[i]["when"], adapted)
            return adapted
    log.debug("%s: %s on %s: not tuned: %s", kernel, when, device_kind, default)
    return default


def device_kind() -> str | None:
    """The kind of TPU that JAX is tracing for, such as "TPU v6 lite", or None when it is not known."""
    import jax

    device = jax.config.jax_default_device  # pyrefly: ignore (made at run time)
    if device is None and jax.default_backend() == "tpu":
        device = jax.devices()[0]
    return getattr(device, "device_kind", None)


@functools.cache
def read_entries(kernel: str, folder: Path) -> dict[str, tuple[dict[str, Any], ...]]:
    """Kind of device -> its entries, of all its files. Read once, so what is wrong with a file is said once."""
    found: dict[str, tuple[dict[str, Any], ...]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            if not path.is_file() or path.stat().st_size > LARGEST_FILE:
                raise ValueError(f"not a file of at most {LARGEST_FILE} bytes")  # a pipe would never end
            body = json.loads(path.read_text(encoding="utf-8"))
            if body["kernel"] != kernel:
                raise ValueError(f"it is for {body['kernel']!r}, not for {kernel!r}")
            device = str(body["device"])
            found[device] = (*found.get(device, ()), *_entries(body["entries"]))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            log.warning("%s: tuned blocks in %s are not used: %s: %s", kernel, path, type(error).__name__, error)
    return found


def _entries(entries: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(entries, list):
        raise TypeError("entries is not a list")
    for entry in entries:
        if not (isinstance(entry, dict) and isinstance(entry.get("when"), dict) and isinstance(entry.get("use"), dict)):
            raise TypeError("an entry is not of the form {when: {...}, use: {...}}")
        yield entry


def _config(use: Mapping[str, Any], default: Config) -> Config | None:
    """`use` as the kernel's Config; None for one with other fields, as from another version of the kernel."""
    fields = {field.name for field in dataclasses.fields(default)}  # pyrefly: ignore (a dataclass)
    if use.keys() != fields or not all(type(value) is int and value > 0 for value in use.values()):
        return None
    return type(default)(**use)


def _distance(tuned: Sizes, when: Sizes) -> float | None:
    """The product of all size ratios, at least 1; None when a name differs or a size is further than FAR away."""
    if tuned.keys() != when.keys():
        return None
    product = 1.0
    for name, value in when.items():
        other = tuned[name]
        if type(other) is not type(value):
            return None
        if type(value) is not int:
            if value != other:
                return None
            continue
        if min(value, other) <= 0 or max(value, other) > FAR * min(value, other):
            return None
        product *= max(value, other) / min(value, other)
    return product
