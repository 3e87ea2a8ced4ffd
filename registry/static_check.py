"""Rules for the Python of a published kernel, checked on the syntax tree: none of the kernel's code is run.

A build variant is loaded from a cache folder, far from any package, so it may import the standard library, torch
(with sympy, which it requires), jax (with numpy and ml_dtypes, which it requires) and, relatively, itself. Kernels made
from a tokamax.toml look tokamax up by name, when they are first called.
"""

import ast
import sys
from collections.abc import Iterator

from pallas_hub.registry.errors import BuildRefused

ALLOWED_PACKAGES = frozenset({"torch", "sympy", "jax", "numpy", "ml_dtypes"})

# Of these a kernel may be without until it is called: not `import tokamax`, but import_module("tokamax").
LATE_PACKAGES = frozenset({"tokamax"})

# What the kernels library accepts on a layer class, see kernels.layer._validate_layer.
LAYER_MEMBERS = frozenset({"forward", "can_torch_compile", "has_backward"})


def parse_files(name: str, files: dict[str, bytes]) -> dict[str, ast.Module]:
    """Path -> syntax tree of every Python file; BuildRefused for a file that does not parse."""
    trees = {}
    for path, data in files.items():
        if not path.endswith(".py"):
            continue
        try:
            trees[path] = ast.parse(data, filename=path)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 0
            raise BuildRefused(f"{name}: {path}:{line}: not valid Python {sys.version_info[0]}: {error}.") from error
    return trees


def check_sources(name: str, files: dict[str, bytes]) -> dict[str, ast.Module]:
    """Raise BuildRefused with every broken rule at once; return the syntax trees."""
    trees = parse_files(name, files)
    faults = []
    for path, tree in trees.items():
        faults += [f"{path}:{line}: {fault}" for line, fault in _import_faults(path, tree, files)]
    if literal_all(trees["__init__.py"]) is None:
        faults.append("__init__.py: no __all__ = [...] of plain strings; it is the public API that a version keeps")
    if "layers.py" in trees:
        faults += [f"layers.py:{line}: {fault}" for line, fault in _layer_faults(trees["layers.py"])]
    if faults:
        raise BuildRefused(f"{name}: {len(faults)} rule{'s' * (len(faults) > 1)} broken:\n  " + "\n  ".join(faults))
    return trees


def literal_all(tree: ast.Module) -> list[str] | None:
    """The names in `__all__`, or None unless it is one literal list or tuple of strings."""
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    if len(values) != 1 or not isinstance(values[0], ast.List | ast.Tuple):
        return None
    names = [item.value for item in values[0].elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return names if names and len(names) == len(values[0].elts) else None


def layer_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Public classes of a layers.py whose base is a torch module (`nn.Module`, `torch.nn.Module`, `Module`)."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = [ast.unparse(base) for base in node.bases]
            if any(base.split(".")[-1] == "Module" for base in bases):
                yield node


def _import_faults(path: str, tree: ast.Module, files: dict[str, bytes]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not _allowed(alias.name):
                    yield node.lineno, _foreign(f"import {alias.name}")
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if not _allowed(node.module or ""):
                yield node.lineno, _foreign(f"from {node.module} import ...")
        elif isinstance(node, ast.ImportFrom):
            yield from _relative_faults(path, node, files)
        elif isinstance(node, ast.Call) and (module := _dynamic_import(node)) and not _allowed_late(module):
            yield node.lineno, _foreign(f"import of {module!r} by name")


def _relative_faults(path: str, node: ast.ImportFrom, files: dict[str, bytes]) -> Iterator[tuple[int, str]]:
    folders = path.split("/")[:-1]
    text = "." * node.level + (node.module or "")
    if node.level > len(folders) + 1:
        yield node.lineno, f"'from {text} import ...' leaves the kernel's folder"
        return
    base = folders[: len(folders) + 1 - node.level] + (node.module.split(".") if node.module else [])
    target = "/".join(base)
    if base and f"{target}.py" not in files and f"{target}/__init__.py" not in files:
        yield node.lineno, f"'from {text} import ...': no such module in this kernel"


def _dynamic_import(node: ast.Call) -> str | None:
    """The module in `import_module("x")` or `__import__("x")`, when written as a plain absolute name."""
    called = ast.unparse(node.func).split(".")[-1]
    if called not in ("import_module", "__import__") or not node.args:
        return None
    value = node.args[0]
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and not value.value.startswith("."):
        return value.value
    return None


def _allowed(module: str) -> bool:
    root = module.split(".")[0]
    return root in ALLOWED_PACKAGES or root in sys.stdlib_module_names


def _allowed_late(module: str) -> bool:
    return _allowed(module) or module.split(".")[0] in LATE_PACKAGES


def _foreign(what: str) -> str:
    return (
        f"'{what}': a kernel may import the standard library, {', '.join(sorted(ALLOWED_PACKAGES))} and, "
        "relatively (from .op import ...), itself"
    )


def _layer_faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for layer in layer_classes(tree):
        members = [member for statement in layer.body for member in _members(statement)]
        if len(layer.bases) != 1 or layer.keywords:
            yield layer.lineno, f"layer {layer.name} must have torch.nn.Module as its only base"
        if "forward" not in members:
            yield layer.lineno, f"layer {layer.name} has no forward"
        for member in members:
            if member not in LAYER_MEMBERS:
                yield (
                    layer.lineno,
                    f"layer {layer.name} has {member!r}: kernelize swaps in forward alone, so a layer holds "
                    f"nothing but {', '.join(sorted(LAYER_MEMBERS))}",
                )


def _members(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement in a class body adds to the class. Bare annotations (`weight: Tensor`) add none."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield ast.unparse(target)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield ast.unparse(statement.target)
    elif not isinstance(statement, ast.AnnAssign | ast.Expr | ast.Pass):
        yield ast.unparse(statement).splitlines()[0]
