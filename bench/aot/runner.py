"""Run compile jobs in worker processes: several at once, each with a time limit, results cached by content.

What can happen to a job, and what it becomes:

    compiled     the compiler took it; its dump was read
    refused      the compiler said no: its own reason, in plain words where we know them
    no estimate  it compiles, but the compiler can't write its bundles, or they could not be read
    crashed      the process ended without an answer, also without the profiler
    timed out    it ran into the time limit
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_hub.bench.aot.files import replace_text
from pallas_hub.bench.aot.programs import folder_of
from pallas_hub.bench.aot.workers import Workers
from pallas_hub.bench.kernel_source import kernel_folder
from pallas_hub.registry.paths import cache_root

DEFAULT_TIMEOUT_S = 180.0


# The files that decide what a worker answers; the report can change without a new compilation.
_WORKER_FILES = ("bundles", "hlo", "jaxprs", "program", "surroundings", "traffic", "worker")
# A full disk ends in the compiler's own check that it could write its dump.
_MACHINES_WORDS = re.compile(
    r"was killed|exit code |^OSError:|^MemoryError:|WriteStringToFile|No space left on device|Cannot allocate memory"
)


@dataclass(frozen=True)
class Job:
    """One program for one target. `program` is what `bench.aot.program` understands."""

    target: str
    program: dict[str, Any]
    options: dict[str, str | bool] = field(default_factory=dict)
    label: str = ""
    around: bool = True  # also estimate the XLA operations around the kernels


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    cache: Path | None = None,
    on_done: Any = None,
) -> list[dict[str, Any]]:
    """Results of `jobs`, in their order. Each is a dict with "status" and, by status, what else is known.

    kernels       the code of each Pallas kernel, or dump_error
    traffic       the traffic of each Pallas kernel, or traffic_reason; for exported programs the caller's to count
    xla           the XLA operations around the kernels, or xla_reason

    `cache` is a folder (default: the user's cache folder); a result is found there again when program, target,
    options and the versions of jax and libtpu are the same. `on_done(job, result)` is called as each one ends.
    """
    folder = cache if cache is not None else cache_folder()
    processes = Workers()

    def run(job: Job) -> dict[str, Any]:
        result = _run(job, folder, timeout_s, processes)
        if on_done is not None:
            on_done(job, result)
        return result

    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
    try:
        return list(pool.map(run, jobs))
    finally:  # interrupted: what has begun is stopped, the rest never begins
        processes.close()
        pool.shutdown(cancel_futures=True)


def require_libtpu() -> None:
    """Raises   LibtpuMissing: the TPU compiler is not installed; the message says how."""
    from pallas_hub.bench.tpu_compile import LibtpuMissing

    if importlib.util.find_spec("libtpu") is None:
        raise LibtpuMissing(
            "the TPU compiler is in libtpu, which is not installed (Linux x86-64 only); "
            "try `pip install 'pallas-hub[aot]'` or `pip install libtpu`."
        )


def cache_folder() -> Path:
    return cache_root() / "aot"


def _run(job: Job, cache: Path, timeout_s: float, processes: Workers) -> dict[str, Any]:
    def run(dump: str) -> dict[str, Any]:
        body = {"target": job.target, "program": job.program, "options": job.options}
        return processes.run(body, dump=dump, timeout_s=timeout_s)

    result = _cached(cache, _key(job, "bundles"), lambda: _compile(run))
    if result["status"] not in ("compiled", "no estimate"):
        return result
    if not result.get("pieces"):
        return result | {"xla": []}
    if not job.around:
        return result
    around = _cached(cache, _key(job, "profile"), lambda: run("profile"))
    result["cached"] &= around["cached"]
    if "xla" in around:
        return result | {"xla": around["xla"]}
    return result | {"xla_reason": around.get("reason") or around.get("dump_error") or plain_reason(around["error"])}


def _cached(cache: Path, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    entry = cache / f"{key}.json"
    try:
        found = json.loads(entry.read_text())
        if _is_result(found):
            return found | {"cached": True}
    except (OSError, ValueError, RecursionError):
        pass  # not there, or not readable as JSON: compile again
    result = run()
    if not _is_the_machines(result):
        _store(entry, result)
    return result | {"cached": False}


def _is_result(found: Any) -> bool:
    """Of the form that a worker answers with. A file that was cut or damaged is compiled again."""
    if not isinstance(found, dict) or not isinstance(found.get("status"), str):
        return False
    known = ("pieces", "xla", "dump_error") if found["status"] == "compiled" else ("reason", "error")
    lists = all(isinstance(found.get(name, []), list) for name in ("kernels", "traffic", "xla"))
    return lists and any(name in found for name in known)


def _is_the_machines(result: dict[str, Any]) -> bool:
    """What ran out of time, memory or disk may be the machine's fault; a worker that did not start is: try again."""
    words = result.get("reason", ""), result.get("error", "")
    return result["status"] == "timed out" or any(map(_MACHINES_WORDS.search, words))


def _store(entry: Path, result: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a cache that can't be written costs time, nothing else
        replace_text(entry, json.dumps(result))


def _key(job: Job, dump: str) -> str:
    """Everything the result depends on. Named functions count with the text of the files around them."""
    program = dict(job.program)
    digest = hashlib.sha256()
    for path in [program.pop("exported", None), *program.pop("pieces", [])]:
        digest.update(Path(path).read_bytes() if path else b"")
    here = Path(__file__).parent
    sources = [here / f"{name}.py" for name in _WORKER_FILES] + [here.parent / "tpu_compile.py"]
    if "kernel" in program:
        sources += [here / "programs.py", here / "moe_peers.py", *sorted(here.glob("of_*.py"))]
        sources += _sources_in(kernel_folder(folder_of(program["kernel"])))
    elif (place := _file_of(program.get("function", ""))) is not None:
        sources += sorted(place.parent.glob("*.py"))
    sources += [Path(arg) for arg in program.get("args", []) if arg.endswith(".npy")]
    for source in filter(Path.is_file, sources):  # an editor's lock is a link to nothing
        digest.update(source.read_bytes())
    versions = {name: _version(name) for name in ("jax", "jaxlib", "libtpu", "tokamax")}
    digest.update(json.dumps([job.target, program, job.options, dump, versions], sort_keys=True).encode())
    return digest.hexdigest()


def _sources_in(kernel: Path) -> list[Path]:
    """Its Python and that of the kernels linked into it, and the blocks tuned for them; of the bridge the look-up."""
    folders = [Path(folder) for folder, _, _ in os.walk(kernel, followlinks=True)]
    patterns = ("*.py", "tuning/*.json")
    found = [path for folder in folders if folder.name != "_bridge" for p in patterns for path in folder.glob(p)]
    return sorted([*found, kernel / "_bridge" / "tuning.py"])


def _file_of(function: str) -> Path | None:
    """Where 'path/to/file.py:function' or 'package.module:function' is defined, as far as that can be told."""
    place = function.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).resolve()
    spec = importlib.util.find_spec(place) if place else None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compile(run: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """When the compiler aborts while it writes its dump, ask whether the program compiles at all."""
    result = run("bundles")
    if result["status"] == "crashed" and not _is_the_machines(result):
        reason = f"the compiler's dump aborts: {result['reason']}"
        result = run("nothing")
        if result["status"] == "compiled":
            return result | {"status": "no estimate", "reason": reason}
    if result["status"] == "refused":
        return result | {"reason": plain_reason(result["error"])}
    if "dump_error" in result:
        return result | {"status": "no estimate", "reason": result["dump_error"]}
    return result


def plain_reason(error: str) -> str:
    """The compiler's reason in plain words, or its own first line."""
    if match := re.search(r"Scoped allocation with size (\S+) and limit (\S+) exceeded", error):
        return f"needs {match[1]} of VMEM, the limit is {match[2]}: smaller blocks, or a higher vmem_limit_bytes"
    if match := re.search(r"Used (\S+) of (\S+) vmem", error):
        return f"needs {match[1]} of VMEM, there are {match[2]}: smaller blocks"
    if "UnprovenMemoryAccessAlignment" in error:
        return "an index into VMEM is not provably a multiple of the tile: use pl.multiple_of or aligned slices"
    if match := re.search(r"last two dimensions of your block shape are divisible by (\d+) and (\d+)", error):
        return f"a block's last two sizes must be multiples of {match[1]} and {match[2]}, or span the whole array"
    if "Not implemented" in error:
        return "the TPU compiler lacks it: " + error[error.index("Not implemented") :].splitlines()[0][:160]
    if "RESOURCE_EXHAUSTED" in error or "Ran out of memory" in error:
        return _shortened(" ".join(error.split()), 600)  # what took the memory stands at the end
    return _shortened(error.splitlines()[0], 200)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length].rpartition(" ")[0] + " ..."
