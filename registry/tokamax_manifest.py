"""A kernel repo from a tokamax.toml: which ops of Tokamax, with which tensors and options, and in which layers.

    [ops.layer_norm]                                  # the op here, and unless `calls` says otherwise, Tokamax's
    summary = "Normalise the last axis."
    tensors = { x = "(..., n)", scale = "(n,) or None", offset = "(n,) or None" }
    options = { epsilon = 1e-6, subtract_mean = true }      # the types are those of the defaults
    fixed = "axis=-1"                                 # what else the call holds, as Python
    result = "(..., n)"                               # of the first tensor's dtype; "(m,) like y"; several: [..., ...]
    tpu = ["xla"]                                     # implementations of Tokamax, best first
    cpu = ["xla"]

    [layers.RMSNorm]
    forward = "hidden_states"
    returns = "layer_norm(hidden_states, self.weight, None, epsilon=self.variance_epsilon, subtract_mean=False)"

tokamax_sources.py makes the kernel's Python of it.
"""

import ast
import keyword
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_hub.registry.errors import SourceError
from pallas_hub.registry.tokamax_runtime import DTYPES, Rule

_TENSOR = re.compile(r"\((?P<sizes>[^()]*)\)(?: (?P<dtypes>float|int|bool))?(?P<optional> or None)?")
_RESULT = re.compile(r"\((?P<sizes>[^()]*)\)(?: like (?P<like>\w+))?")
_SIZE = re.compile(r"[a-z]\w*|\d+")
_NEEDED = {"tensors", "result", "tpu", "cpu"}
_KEYS = _NEEDED | {"calls", "summary", "options", "fixed"}


@dataclass(frozen=True)
class Op:
    """One [ops.NAME] table, checked."""

    name: str
    calls: str
    summary: str
    rules: tuple[Rule, ...]
    options: dict[str, Any]
    fixed: str
    results: tuple[Rule, ...]  # named like the tensor whose dtype they have
    implementations: dict[str, list[str]]


def read_manifest(path: Path) -> tuple[list[Op], dict[str, dict[str, str]]]:
    """Its ops and its layers.

    Raises   SourceError: it is not of this form; the message names the field.
    """
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: not valid TOML: {error}") from error
    ops = body.get("ops")
    if not isinstance(ops, dict) or not ops or set(body) - {"ops", "layers"}:
        raise SourceError(f"{path}: must hold [ops.NAME] tables and, if wanted, [layers.NAME]; got {', '.join(body)}.")
    layers = body.get("layers", {})
    for layer, table in layers.items():
        if not isinstance(table, dict) or set(table) != {"forward", "returns"} or not layer.isidentifier():
            raise SourceError(f'{path}: [layers.{layer}] must hold forward = "hidden_states" and returns = "...".')
        _parse(path, f"layers.{layer}", f"def f(self, {table['forward']}): return {table['returns']}")
        if not any(calls_op(table["returns"], op) for op in ops):
            raise SourceError(f"{path}: layers.{layer}.returns calls none of the ops: {', '.join(ops)}.")
    return [_read_op(path, name, table) for name, table in ops.items()], layers


def _read_op(path: Path, name: str, table: Any) -> Op:
    place = f"ops.{name}"
    if not isinstance(table, dict) or not set(table) >= _NEEDED or set(table) - _KEYS:
        raise SourceError(
            f"{path}: [{place}] must hold {', '.join(sorted(_NEEDED))} "
            f"and may hold {', '.join(sorted(_KEYS - _NEEDED))}; "
            f"got {', '.join(table) if isinstance(table, dict) else table!r}."
        )
    tensors, options = table["tensors"], table.get("options", {})
    if not isinstance(tensors, dict) or not tensors or not isinstance(options, dict):
        raise SourceError(f"{path}: {place}.tensors and {place}.options must be tables, the first not empty.")
    rules = tuple(_rule(path, place, tensor, text) for tensor, text in tensors.items())
    if rules[0].optional:
        raise SourceError(f"{path}: {place}.tensors.{rules[0].name} is the first, and can't be left out.")
    for option, value in options.items():
        if not isinstance(value, bool | int | float | str):
            raise SourceError(f"{path}: {place}.options.{option} must be a number, true, false or a text; got {value}.")
    for identifier in (name, *tensors, *options):
        if not identifier.isidentifier() or keyword.iskeyword(identifier):
            raise SourceError(f"{path}: {place}: {identifier!r} is not a Python name.")
    given = table["result"] if isinstance(table["result"], list) else [table["result"]]
    results = tuple(_result(path, place, rules, text) for text in given)
    implementations = {device: table[device] for device in ("tpu", "cpu")}
    for device, names in implementations.items():
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            raise SourceError(f'{path}: {place}.{device} must list implementations, as in ["mosaic", "xla"].')
    fixed = table.get("fixed", "")
    _parse(path, f"{place}.fixed", f"f({fixed})")
    return Op(name, table.get("calls", name), table.get("summary", ""), rules, options, fixed, results, implementations)


def _rule(path: Path, place: str, tensor: str, text: Any) -> Rule:
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    sizes = _sizes(match)
    if match is None or sizes is None:
        raise SourceError(
            f'{path}: {place}.tensors.{tensor} must be like "(m, k)", "(..., n) float", "(g,) int" or "(n,) or None", '
            f"with dtypes of {', '.join(DTYPES)}; got {text!r}."
        )
    return Rule(tensor, sizes, match["dtypes"] or "float", bool(match["optional"]))


def _result(path: Path, place: str, rules: tuple[Rule, ...], text: Any) -> Rule:
    match = _RESULT.fullmatch(text) if isinstance(text, str) else None
    sizes = _sizes(match)
    known = {size for rule in rules for size in rule.sizes}
    if match is None or sizes is None or any(size not in known and not size.isdigit() for size in sizes):
        raise SourceError(
            f'{path}: {place}.result must be like "(m, n)" or "(m,) like lhs", with the sizes of tensors: '
            f"{', '.join(sorted(known))}; got {text!r}."
        )
    like = match["like"] or rules[0].name
    if like not in [rule.name for rule in rules]:
        raise SourceError(f"{path}: {place}.result is like {like!r}, which is no tensor of this op.")
    return Rule(like, sizes)


def _sizes(match: re.Match[str] | None) -> tuple[str, ...] | None:
    sizes = tuple(size.strip() for size in match["sizes"].split(",") if size.strip()) if match else ()
    fits = all(_SIZE.fullmatch(size) or (size == "..." and i == 0) for i, size in enumerate(sizes))
    return sizes if match and fits else None


def calls_op(returns: str, op: str) -> bool:
    return re.search(rf"\b{op}\(", returns) is not None


def _parse(path: Path, place: str, code: str) -> None:
    try:
        ast.parse(code)
    except SyntaxError as error:
        raise SourceError(f"{path}: {place} is not Python: {error.msg}: {code!r}.") from error
