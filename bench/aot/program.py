"""Programs as data: what a worker process is asked to compile.

    {"exported": FILE, "pieces": [FILE, ...]}            traced and serialised by the parent, so any callable will do
    {"function": "file.py:name", "args": ["bf16[8,128]"], "static": {}}     imported and traced in the worker
    {"kernel": NAME, "op": ..., "case": ..., "impl": ..., "blocks": ...}    one of `bench.aot.programs`, likewise

The last two are traced for the target, so code that asks JAX which TPU it runs on gets the right answer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    "pred": "bool_",
    "s8": "int8",
    "s32": "int32",
    "u8": "uint8",
    "u32": "uint32",
}


@dataclass(frozen=True)
class Loaded:
    """A program as a worker handles it. `counted` is the call whose traffic counts, None when the parent counts it."""

    fn: Callable
    shapes: list[Any]
    counted: tuple[Callable, Sequence[Any]] | None
    pieces: list[tuple[Callable, Sequence[Any]]] | None  # None: to be cut out of fn


def parse_argument(text: str) -> Any:
    """'bf16[512,2048]' -> jax.ShapeDtypeStruct((512, 2048), bfloat16); 'sizes.npy' -> the array in that file.

    Raises   ValueError: not of that form, an unknown dtype, or no such file.
    """
    import jax
    import jax.numpy as jnp

    if text.endswith(".npy"):
        import numpy as np

        if not Path(text).is_file():
            raise ValueError(f"argument {text!r}: there is no such file.")
        return np.load(text, allow_pickle=False)
    match = _ARGUMENT.match(text.strip())
    if match is None:
        raise ValueError(
            f"argument {text!r}: write dtype[shape], for example bf16[512,2048] or s32[128], or name a .npy file."
        )
    name = _DTYPES.get(match["dtype"], match["dtype"])
    try:
        dtype = jnp.dtype(getattr(jnp, name))
    except (AttributeError, TypeError):
        known = ", ".join(_DTYPES)
        raise ValueError(f"argument {text!r}: unknown dtype {match['dtype']!r}; try one of {known}.") from None
    shape = tuple(int(size) for size in match["shape"].split(",") if size.strip())
    return jax.ShapeDtypeStruct(shape, dtype)


def find_function(name: str) -> Callable:
    """The function named 'package.module:function' or 'path/to/file.py:function'.

    Raises   ValueError: no such module, file or function.
    """
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"{name!r}: write module:function or path/to/file.py:function.")
    module = _load_file(name, Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{name!r}: {place} has no function {attribute!r}.")
    return function


def _load_file(name: str, path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{name!r}: there is no file {path}.")
    sys.path.insert(0, str(path.parent))  # so that the file finds its neighbours
    module_name = f"_aot_{path.stem}"  # a file may be called jax.py, or json.py
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{name!r}: {path} can't be loaded as a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def shapes_of(args: Sequence[Any]) -> list[Any]:
    import jax

    return [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arg) for arg in args]


def load_program(program: dict[str, Any]) -> Loaded:
    """The program that a worker's job names."""
    if "exported" in program:
        fn, shapes = _load_exported(program["exported"])
        return Loaded(fn, shapes, None, [_load_exported(piece) for piece in program["pieces"]])
    if "kernel" in program:
        from pallas_hub.bench.aot.programs import find_program

        found = find_program(program)
        counted = found.counted_as or (found.fn, found.args)
        return Loaded(found.fn, shapes_of(found.args), counted, None)
    args = [parse_argument(text) for text in program["args"]]
    fn = functools.partial(find_function(program["function"]), **program["static"])
    return Loaded(fn, shapes_of(args), (fn, args), None)


def _load_exported(path: str) -> tuple[Callable, list[Any]]:
    import jax

    traced = jax.export.deserialize(bytearray(Path(path).read_bytes()))
    return traced.call, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.in_avals]
