"""The Python of a repo made from its tokamax.toml: kernel.py, op.py, layers.py and __init__.py, beside _tokamax.py.

A file of one of these four names in the kernel's folder stands in for the one made, unless it says that it was made:
then it has to be what the manifest gives.
"""

from collections.abc import Sequence
from pathlib import Path

from pallas_hub.registry.errors import SourceError
from pallas_hub.registry.tokamax_manifest import Op, calls_op, read_manifest
from pallas_hub.registry.tokamax_runtime import DTYPES, Rule

MANIFEST = "tokamax.toml"
MADE = "Made from tokamax.toml; edit that."
RUNTIME_NAME = "_tokamax.py"  # in a kernel's folder, a link to this one:
RUNTIME = Path(__file__).with_name("tokamax_runtime.py")


def read_made_files(folder: Path, name: str, present: dict[str, bytes]) -> dict[str, bytes]:
    """The files that kernels/<name> lacks and its tokamax.toml gives; {} without one.

    Raises   SourceError: the manifest is malformed, or a file in the folder says that it was made of it and differs.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    ops, layers = read_manifest(path)
    made = {
        RUNTIME_NAME: RUNTIME.read_text(encoding="utf-8"),
        "kernel.py": _kernel(ops),
        "op.py": _op(ops, name),
        "layers.py": _layers(layers, ops),
        "__init__.py": _init(ops, layers),
    }
    for file, text in made.items():
        theirs = present.get(file, b"").decode(errors="replace")
        if MADE in theirs and theirs != text:
            raise SourceError(
                f"{name}: {file} is not what {MANIFEST} gives. Remove it and build: the build makes it; to keep it in "
                f"the folder, copy it from the build."
            )
    return {file: text.encode() for file, text in made.items() if file not in present}


def _kernel(ops: list[Op]) -> str:
    body = "".join(_kernel_function(op) for op in ops)
    head = _KERNEL_HEAD.format(made=MADE) + ("\nimport jax\n" if "jax." in body else "")
    return head + body


def _kernel_function(op: Op) -> str:
    names = [rule.name for rule in op.rules]
    given = [f"{name}={name}" for name in [*names, *op.options]]
    arguments = [*given, *filter(None, [op.fixed]), "implementation=implementation"]
    return (
        "\n\n"
        + _parameters(f"def {op.name}(", ["tokamax", *names, "*", *op.options, "implementation"], "):")
        + f"\n    return tokamax.{op.calls}(\n"
        + "".join(f"        {argument},\n" for argument in arguments)
        + "    )\n"
    )


def _op(ops: list[Op], name: str) -> str:
    return _OP_HEAD.format(made=MADE, kernel=name) + "".join(_OP.format(**_fields(op)) for op in ops)


def _fields(op: Op) -> dict[str, str]:
    tensors = [f"{rule.name}: Tensor{' | None = None' if _may_be_left_out(rule, op) else ''}" for rule in op.rules]
    options = [f"{option}: {type(value).__name__} = {value!r}" for option, value in op.options.items()]
    kinds = {rule.dtypes for rule in op.rules}
    returns = "Tensor" if len(op.results) == 1 else f"tuple[{', '.join(['Tensor'] * len(op.results))}]"
    return {
        "op": op.name,
        "rules": "".join(f"    {_rule_text(rule)},\n" for rule in op.rules),
        "results": "(" + "".join(f"{_rule_text(result)}, " for result in op.results).strip() + ")",
        "signature": _parameters(f"def _{op.name}_signature(", [*tensors, *options], f") -> {returns}: ..."),
        "public": _parameters(f"def {op.name}(", [*tensors, *(["*"] if options else []), *options], f") -> {returns}:"),
        "calls": op.calls,
        "tpu": _quoted(op.implementations["tpu"]),
        "cpu": _quoted(op.implementations["cpu"]),
        "names": ", ".join(rule.name for rule in op.rules) + ("," if len(op.rules) == 1 else ""),
        "first": op.rules[0].name,
        "values": ", ".join([*(rule.name for rule in op.rules), *op.options]),
        "summary": op.summary or f"{op.calls} of Tokamax.",
        "shapes": f"{', '.join(map(_shape_text, op.rules))}  ->  {', '.join(map(str, op.results))}",
        "dtypes": "; ".join(_dtypes_text(kind, op) for kind in DTYPES if kind in kinds),
        "runs": f"on TPU {_or_else(op.implementations['tpu'])}, on CPU {_or_else(op.implementations['cpu'])}",
    }


def _parameters(head: str, parameters: list[str], tail: str) -> str:
    """As ruff writes them: in one line, or one line each."""
    line = f"{head}{', '.join(parameters)}{tail}"
    if len(line) <= 120:
        return line
    return "\n".join([head, *(f"    {parameter}," for parameter in parameters), tail])


def _may_be_left_out(rule: Rule, op: Op) -> bool:
    """A default may only stand behind arguments that have none or one themselves."""
    after = op.rules[op.rules.index(rule) :]
    return all(other.optional for other in after)


def _rule_text(rule: Rule) -> str:
    more = "" if rule.dtypes == "float" and not rule.optional else f', "{rule.dtypes}"'
    return f'Rule("{rule.name}", {_quoted(rule.sizes)}{more}{", True" if rule.optional else ""})'


def _quoted(items: Sequence[str]) -> str:
    return "(" + ", ".join(f'"{item}"' for item in items) + (",)" if len(items) == 1 else ")")


def _shape_text(rule: Rule) -> str:
    return f"{rule.name} {rule}{' or None' if rule.optional else ''}"


def _dtypes_text(kind: str, op: Op) -> str:
    """'lhs, rhs: float32, bfloat16, float16'"""
    return f"{', '.join(rule.name for rule in op.rules if rule.dtypes == kind)}: {', '.join(DTYPES[kind])}"


def _or_else(implementations: list[str]) -> str:
    return " or else ".join(implementations)


def _layers(layers: dict[str, dict[str, str]], ops: list[Op]) -> str:
    if not layers:
        return f'"""No layers. {MADE}"""\n\n__all__: list[str] = []\n'
    used = [op.name for op in ops if any(calls_op(table["returns"], op.name) for table in layers.values())]
    body = "".join(_LAYER.format(name=name, **table) for name, table in layers.items())
    return _LAYERS_HEAD.format(made=MADE, ops=", ".join(sorted(used))) + body


def _init(ops: list[Op], layers: dict[str, dict[str, str]]) -> str:
    names = sorted(op.name for op in ops)
    listed = ", ".join(f'"{name}"' for name in sorted([*names, "layers"]))
    return _INIT.format(made=MADE, names=", ".join(names), listed=listed)


_KERNEL_HEAD = '''"""The calls of Tokamax, as JAX functions. {made}"""

from __future__ import annotations
'''

_OP_HEAD = '''"""Ops of Tokamax as torch ops. {made}"""

from __future__ import annotations

from torch import Tensor

from ._bridge import jax_op
from ._tokamax import ResultShapes, Rule, TokamaxCall, check

KERNEL = "{kernel}"


def _declare(op, signature, rules, results, tpu, cpu):
    """One op per device, so that record_paths tells which ran."""
    shapes = ResultShapes(rules, results)
    for device, implementations in (("tpu", tpu), ("cpu", cpu)):
        call = TokamaxCall(op, KERNEL, ".kernel", __package__, device, implementations, len(rules))
        options = {{"fn": call, "vjp": call.vjp, "shape_fn": shapes, "signature": signature}}
        yield jax_op(f"{{op}}_{{device}}", namespace=__package__, **options)
'''

_OP = '''

{signature}


_{op}_rules = (
{rules})
_{op}_results = {results}
_{op}_tpu, _{op}_cpu = _declare(
    "{op}",
    _{op}_signature,
    _{op}_rules,
    _{op}_results,
    tpu={tpu},
    cpu={cpu},
)


{public}
    """{summary}

    Shapes   {shapes}
    Dtypes   {dtypes}
    Grads    of every float tensor, first order
    Raises   ValueError: shapes that do not match.  TypeError: a dtype outside the list.  ImportError: no tokamax
    Runs     {runs}
    Source   tokamax.{calls}
    """
    check("{op}", _{op}_rules, ({names}))
    run = _{op}_tpu if {first}.device.type == "tpu" else _{op}_cpu
    return run({values})
'''

_LAYERS_HEAD = '''"""Layers for `kernels.kernelize`. {made}"""

from torch import Tensor, nn

from .op import {ops}
'''

_LAYER = """

class {name}(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, {forward}) -> Tensor:
        return {returns}
"""

_INIT = '''"""Ops of Tokamax for PyTorch. {made}"""

from . import layers
from .op import {names}

__all__ = [{listed}]
'''
