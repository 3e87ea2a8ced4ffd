"""Compile one program for one TPU generation in a process of its own and write what the compiler says as JSON.

libtpu may abort the process, print what it likes, and reads its dump options once, when it is first used. So this file
runs as `python -m pallas_hub.bench.aot.worker JOB.json RESULT.json` and is never imported by the product.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

# What a job may ask libtpu to write. The profile (the cycles the compiler expects for each XLA operation) aborts on
# kernels whose grid or index maps depend on data, so it is asked of programs without them.
DUMP_FLAGS = {
    "bundles": ("--xla_jf_dump_to={dump}", "--xla_jf_dump_llo_text=true"),
    "profile": (
        "--xla_jf_dump_to={dump}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_static_llo_profile_to={dump}/profile",
        "--xla_jf_hlo_deduplication=false",  # the profiler can't find operations that share code
    ),
    "nothing": (),
}


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    with tempfile.TemporaryDirectory(prefix="pallas-hub-aot-") as dump:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(flag.format(dump=dump) for flag in DUMP_FLAGS[job["dump"]])
        result = _compile(job)
        if job["dump"] != "nothing" and result["status"] == "compiled":
            result.update(_read_dump(job["dump"], Path(dump)))
    # Renamed into place: a reader sees a whole result or none.
    partial = Path(result_path).with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(result_path)


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    from pallas_hub.bench.aot.program import load_program
    from pallas_hub.bench.tpu_compile import compile_for_tpu, tpu_device

    tpu_device(job["target"])  # loading libtpu is no part of the compile time
    started = time.perf_counter()
    try:
        fn, args = load_program(job["program"])
        compiled = compile_for_tpu(fn, *args, target=job["target"], options=job["options"])
    except Exception as error:  # whatever the compiler refuses with is data for the report
        return {"status": "refused", "error": f"{type(error).__name__}: {error}"}
    memory = compiled.memory_analysis()
    return {
        "status": "compiled",
        "seconds": time.perf_counter() - started,
        "hbm_temporary_bytes": memory.temp_size_in_bytes,
        "hbm_argument_bytes": memory.argument_size_in_bytes,
        "hbm_output_bytes": memory.output_size_in_bytes,
    }


def _read_dump(what: str, dump: Path) -> dict[str, Any]:
    from pallas_hub.bench.aot.bundles import DumpError, read_kernels
    from pallas_hub.bench.aot.hlo import read_operations

    try:
        if what == "bundles":
            return {"kernels": [asdict(kernel) for kernel in read_kernels(dump)]}
        return {"xla": [asdict(operation) for operation in read_operations(dump)]}
    except DumpError as error:
        return {"dump_error": str(error)}


if __name__ == "__main__":
    main(*sys.argv[1:])
