"""Compile one program for one TPU generation in a process of its own and write what the compiler says as JSON.

libtpu may abort the process, print what it likes, and reads its dump options once, when it is first used. So this file
runs as `python -m pallas_hub.bench.aot.worker JOB.json RESULT.json` and is never imported by the product. What a job
asks for ("dump"):

    bundles    compile the program; read its kernels' bundles; count their traffic
    nothing    the same without the dump, for programs whose dump aborts
    profile    compile the pieces between the kernels; read the cycles the compiler expects for each XLA operation
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

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


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    with tempfile.TemporaryDirectory(prefix="pallas-hub-aot-") as dump:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(flag.format(dump=dump) for flag in DUMP_FLAGS[job["dump"]])
        result = _run(job, Path(dump))
    # Renamed into place: a reader sees a whole result or none.
    partial = Path(result_path).with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(result_path)


def _run(job: dict[str, Any], dump: Path) -> dict[str, Any]:
    from pallas_hub.bench.aot.errors import DumpError
    from pallas_hub.bench.aot.program import load_program
    from pallas_hub.bench.tpu_compile import tpu_device

    device = tpu_device(job["target"])  # loading libtpu is no part of the compile time
    try:
        loaded = load_program(job["program"])
        if job["dump"] == "profile":
            return {"status": "compiled", "xla": _profile(job, loaded, device, dump)}
        result = _compile(job, loaded)
        result.update(_count(loaded, device))
    except DumpError as error:
        return {"status": "compiled", "dump_error": str(error)}
    except Exception as error:  # whatever the compiler refuses with is data for the report
        return {"status": "refused", "error": f"{type(error).__name__}: {error}"}
    if job["dump"] == "bundles":
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
    }


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
        for old in dump.iterdir():  # the names of operations repeat from piece to piece
            shutil.rmtree(old) if old.is_dir() else old.unlink()
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
