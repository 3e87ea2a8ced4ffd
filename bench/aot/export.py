"""Hand a traced program to a worker process, as a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def export_program(fn: Callable, args: Sequence[Any], path: Path) -> str:
    """Trace `fn(*args)` for TPUs and write it to `path`; needs no TPU compiler.

    Raises   ImportError: no flatbuffers.
    """
    import jax

    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "compile_report: handing a function to the compiler's process needs flatbuffers; "
            "try `pip install flatbuffers`."
        ) from error
    # Without the lines it was called from, so that equal programs are equal files: the cache goes by their content.
    limit = jax.config.jax_traceback_in_locations_limit  # pyrefly: ignore (made at run time)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        traced = jax.export.export(jax.jit(fn), platforms=["tpu"])(*args)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    path.write_bytes(bytes(traced.serialize()))
    return str(path)
