"""Programs as data: what a worker process is asked to compile.

A program is either exported (traced and serialised by the parent, so any callable will do) or named (a function that
has to be traced in the worker, because it asks JAX which TPU it runs on).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_ARGUMENT = re.compile(r"^(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\]$")
# Names as the compiler prints them, beside numpy's own.
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "pred": "bool",
    "s8": "int8",
    "s32": "int32",
    "u8": "uint8",
    "u32": "uint32",
}


def parse_argument(text: str) -> Any:
    """'bf16[512,2048]' -> jax.ShapeDtypeStruct((512, 2048), bfloat16).

    Raises   ValueError: not of that form, or an unknown dtype.
    """
    import jax
    import jax.numpy as jnp

    match = _ARGUMENT.match(text.strip())
    if match is None:
        raise ValueError(f"argument {text!r}: write dtype[shape], for example bf16[512,2048] or s32[128].")
    name = _DTYPES.get(match["dtype"], match["dtype"])
    if not hasattr(jnp, name):
        raise ValueError(f"argument {text!r}: unknown dtype {match['dtype']!r}; try one of {', '.join(_DTYPES)}.")
    shape = tuple(int(size) for size in match["shape"].split(",") if size.strip())
    return jax.ShapeDtypeStruct(shape, jnp.dtype(name))


def find_function(name: str) -> Callable:
    """The function named 'package.module:function' or 'path/to/file.py:function'.

    Raises   ValueError: no such module, file or function.
    """
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"{name!r}: write module:function or path/to/file.py:function.")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise ValueError(f"{name!r}: there is no file {path}.")
        sys.path.insert(0, str(path.parent))  # so that the file finds its neighbours
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{name!r}: {path} can't be loaded as a Python module.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not callable(getattr(module, attribute, None)):
        raise ValueError(f"{name!r}: {place} has no function {attribute!r}.")
    return getattr(module, attribute)


def export_program(fn: Callable, args: Sequence[Any], static: dict[str, Any]) -> bytes:
    """Trace `fn(*args, **static)` for TPUs and serialise it; needs no TPU compiler."""
    import jax

    traced = jax.export.export(jax.jit(functools.partial(fn, **static)), platforms=["tpu"])(*args)
    return bytes(traced.serialize())


def load_program(program: dict[str, Any]) -> tuple[Callable, list[Any]]:
    """The function and argument shapes a worker's job names."""
    if "exported" in program:
        import jax

        traced = jax.export.deserialize(bytearray(Path(program["exported"]).read_bytes()))
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.in_avals]
        return traced.call, shapes
    args = [parse_argument(text) for text in program["args"]]
    return functools.partial(find_function(program["function"]), **program["static"]), args
