"""Compile programs for TPUs, one after the other, and say as JSON what the compiler made of each.

libtpu may abort the process, print what it likes, and reads its dump options once, when it is first used. So this file
runs as `python -m pallas_hub.bench.aot.worker DUMP`, reads one job per line and answers each with a line; it is never
imported by the product. What the jobs ask for (DUMP):

    bundles    compile the program; read its kernels' bundles; count their traffic
    nothing    the same without the dump, for programs whose dump aborts
    profile    compile the pieces between the kernels; read the cycles the compiler expects for each XLA operation
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

# Of some 70 stages of each operation, the first and the last: a dump of 1 MB instead of 20.
_DUMP = (
    "--xla_jf_dump_to={dump}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=.*(original|final).*",
)
DUMP_FLAGS = {
    "bundles": _DUMP,
    "profile": (*_DUMP, "--xla_jf_dump_static_llo_profile_to={dump}/profile"),
    "nothing": (),
}


def main(kind: str) -> None:
    jobs, answers = _take_pipes()
    sys.path.append(os.getcwd())  # last, so that nothing there stands for another module
    with tempfile.TemporaryDirectory(prefix="pallas-hub-aot-") as folder:
        _end_with_parent(folder)
        dump = Path(folder)
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(flag.format(dump=dump) for flag in DUMP_FLAGS[kind])
        for line in jobs:
            answer = _run_here(json.loads(line), kind, dump)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            _clear(dump)


def _end_with_parent(folder: str) -> None:
    """Killed, the parent leaves a worker that may hang in the compiler, or wait for jobs while a fork has its pipe."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        shutil.rmtree(folder, ignore_errors=True)
        own = Path(folder).parent
        if own.name.startswith("pallas-hub-worker-"):  # the parent made it for this worker alone
            shutil.rmtree(own, ignore_errors=True)
        # With what the programs have forked, if this worker leads its session as the parent lets it.
        os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_here(job: dict[str, Any], kind: str, dump: Path) -> dict[str, Any]:
    """A program that forks comes back twice: only this process may answer, and clear the folder."""
    me = os.getpid()
    try:
        return _run(job, kind, dump)
    finally:
        if os.getpid() != me:
            os._exit(1)


def _take_pipes() -> tuple[IO[str], IO[str]]:
    """Standard input and output, for jobs and answers alone: what libtpu and traced code print goes to stderr."""
    jobs, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return jobs, answers


def _clear(dump: Path) -> None:
    """The names of kernels and operations repeat from one compilation to the next."""
    for old in dump.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def _run(job: dict[str, Any], kind: str, dump: Path) -> dict[str, Any]:
    from pallas_hub.bench.aot.errors import DumpError
    from pallas_hub.bench.aot.program import load_program
    from pallas_hub.bench.tpu_compile import tpu_device

    device = tpu_device(job["target"])  # loading libtpu is no part of the compile time
    try:
        loaded = load_program(job["program"])
        if kind == "profile":
            return {"status": "compiled", "xla": _profile(job, loaded, device, dump)}
        result = _compile(job, loaded)
        result.update(_count(loaded, device))
    except DumpError as error:
        return {"status": "compiled", "dump_error": str(error)}
    except Exception as error:  # whatever the compiler refuses with is data for the report
        return {"status": "refused", "error": f"{type(error).__name__}: {error}"}
    if kind == "bundles":
        result.update(_read_kernels(dump))
    return result


def _compile(job: dict[str, Any], loaded: Any) -> dict[str, Any]:
    from pallas_hub.bench.tpu_compile import compile_for_tpu

    started = time.perf_counter()
    compiled = compile_for_tpu(loaded.fn, *loaded.shapes, target=job["target"], options=job["options"])
    memory = compiled.memory_analysis()
    return {
        "status": "compiled",
        "seconds": time.perf_counter() - started,
        "hbm_temporary_bytes": memory.temp_size_in_bytes,
        "cost": _compilers_own_cost(compiled),
    }


def _compilers_own_cost(compiled: Any) -> dict[str, float]:
    """What the compiler reckons for the whole program: seconds, operations and bytes; it can't see into kernels."""
    cost = compiled.cost_analysis() or {}
    names = {"seconds": "optimal_seconds", "flops": "flops", "bytes": "bytes accessed"}
    return {ours: float(cost[theirs]) for ours, theirs in names.items() if cost.get(theirs, 0) > 0}


def _count(loaded: Any, device: Any) -> dict[str, Any]:
    from pallas_hub.bench.aot.traffic import TrafficUnknown, count_traffic

    if loaded.counted is None:
        return {"pieces": len(loaded.pieces)}
    result: dict[str, Any] = {"pieces": len(_pieces(loaded, device))}
    try:
        result["traffic"] = [traffic.as_numbers() for traffic in count_traffic(*loaded.counted, device=device)]
    except TrafficUnknown as error:
        result["traffic_reason"] = str(error)
    return result


def _pieces(loaded: Any, device: Any) -> list[Any]:
    import jax

    from pallas_hub.bench.aot.surroundings import split_at_kernels

    if loaded.pieces is not None:
        return loaded.pieces
    with jax.default_device(device):
        return [(piece.fn, piece.args) for piece in split_at_kernels(loaded.fn, loaded.shapes)]


def _profile(job: dict[str, Any], loaded: Any, device: Any, dump: Path) -> list[dict[str, Any]]:
    from pallas_hub.bench.aot.hlo import read_operations
    from pallas_hub.bench.tpu_compile import compile_for_tpu

    operations = []
    for fn, args in _pieces(loaded, device):
        _clear(dump)
        compile_for_tpu(fn, *args, target=job["target"], options=job["options"])
        operations += [asdict(operation) for operation in read_operations(dump)]
    return operations


def _read_kernels(dump: Path) -> dict[str, Any]:
    from pallas_hub.bench.aot.bundles import DumpError, read_kernels

    try:
        return {"kernels": [asdict(kernel) for kernel in read_kernels(dump)]}
    except DumpError as error:
        return {"dump_error": str(error)}


if __name__ == "__main__":
    main(*sys.argv[1:])
