"""The public API of a kernel, read from its syntax trees, and the rule for changing it within a version.

Adding is compatible, removing and changing are not: every call that a version ever accepted stays valid, with the same
defaults, and whatever `__all__` held stays in it. Annotations may change.
"""

import ast
from dataclasses import dataclass, field

from pallas_hub.registry.errors import BuildRefused
from pallas_hub.registry.static_check import layer_classes, literal_all

_FLAGS = ("can_torch_compile", "has_backward")


@dataclass(frozen=True)
class Api:
    """`names`: each name in `__all__` -> its signature, or its kind: `<module>`, `<class>`, `<value>`.

    `layers`: layer class -> {"forward": signature, "can_torch_compile": bool, "has_backward": bool}.
    """

    names: dict[str, str] = field(default_factory=dict)
    layers: dict[str, dict] = field(default_factory=dict)


def read_api(name: str, trees: dict[str, ast.Module]) -> Api:
    """The API that `__init__.py` exports, following its relative imports."""
    exported = literal_all(trees["__init__.py"])
    if exported is None:
        raise BuildRefused(f"{name}: __init__.py: no __all__ = [...] of plain strings")
    names = {}
    for public in sorted(exported):
        found = _describe(public, "__init__.py", trees)
        if found is None:
            raise BuildRefused(f"{name}: __init__.py: __all__ lists {public!r}, which is neither defined nor imported.")
        names[public] = found
    layers = {}
    if "layers.py" in trees:
        layers = {layer.name: _describe_layer(layer) for layer in layer_classes(trees["layers.py"])}
    return Api(names=names, layers=dict(sorted(layers.items())))


def changes(old: Api, new: Api) -> list[str]:
    """What a user of `old` would lose with `new`; empty if every old use still works."""
    found = []
    for public, was in old.names.items():
        now = new.names.get(public)
        if now is None:
            found.append(f"{public} is gone from __all__")
        elif problem := _signature_change(was, now):
            found.append(f"{public}{problem}")
    for layer, was in old.layers.items():
        now = new.layers.get(layer)
        if now is None:
            found.append(f"layer {layer} is gone")
            continue
        # kernelize compares the count and kinds of forward's parameters with the replaced layer's: none may be added.
        if _parameters(was["forward"]) != _parameters(now["forward"]):
            found.append(f"layer {layer}: forward{was['forward']} became forward{now['forward']}")
        found += [f"layer {layer}: {flag} was true, is false" for flag in _FLAGS if was[flag] and not now[flag]]
    return found


def _describe(public: str, path: str, trees: dict[str, ast.Module], depth: int = 0) -> str | None:
    """Signature or kind of `public` as seen in the file at `path`; None if the file does not define it."""
    tree = trees.get(path)
    if tree is None or depth > 8:  # 8 hops: an import cycle, not a definition
        return None
    found = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == public and node in tree.body:
            found = signature_text(node.args, node.returns)
        elif isinstance(node, ast.ClassDef) and node.name == public and node in tree.body:
            found = "<class>"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node in tree.body and _assigns(node, public):
            found = "<value>"
        elif isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == public:
                    found = _follow(path, node, alias.name, trees, depth)
    return found


def _follow(path: str, node: ast.ImportFrom, original: str, trees: dict[str, ast.Module], depth: int) -> str | None:
    folders = path.split("/")[:-1]
    base = folders[: len(folders) + 1 - node.level] + (node.module.split(".") if node.module else [])
    inside = "/".join([*base, original])
    if f"{inside}.py" in trees or f"{inside}/__init__.py" in trees:
        return "<module>"
    module = "/".join(base)
    for target in (f"{module}.py", f"{module}/__init__.py" if module else "__init__.py"):
        if target in trees:
            return _describe(original, target, trees, depth + 1)
    return None


def _assigns(node: ast.Assign | ast.AnnAssign, public: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == public for target in targets)


def _describe_layer(layer: ast.ClassDef) -> dict:
    forward = next(node for node in layer.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    # The kernels library reads a missing has_backward as True and a missing can_torch_compile as False.
    flags = {"can_torch_compile": False, "has_backward": True}
    for node in layer.body:
        for flag in _FLAGS:
            if isinstance(node, ast.Assign | ast.AnnAssign) and _assigns(node, flag):
                flags[flag] = isinstance(node.value, ast.Constant) and node.value.value is True
    return {"forward": signature_text(forward.args, forward.returns), **flags}


def signature_text(args: ast.arguments, returns: ast.expr | None) -> str:
    """`(x, weight, eps=1e-06) -> Tensor`, spelled the same by every Python version."""
    return f"({ast.unparse(args)})" + (f" -> {ast.unparse(returns)}" if returns is not None else "")


def _parameters(text: str) -> list[tuple[str, str, str | None]] | None:
    """(name, kind, default) for each parameter of a signature text; None for `<module>` and the like."""
    if text.startswith("<"):
        return None
    args = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    positional = [(arg.arg, "positional-only") for arg in args.posonlyargs] + [(arg.arg, "plain") for arg in args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + [ast.unparse(value) for value in args.defaults]
    result = [(name, kind, default) for (name, kind), default in zip(positional, defaults, strict=True)]
    if args.vararg:
        result.append((args.vararg.arg, "*", None))
    for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        result.append((arg.arg, "keyword-only", None if value is None else ast.unparse(value)))
    if args.kwarg:
        result.append((args.kwarg.arg, "**", None))
    return result


def _signature_change(was: str, now: str) -> str | None:
    old, new = _parameters(was), _parameters(now)
    if old is None or new is None:
        # A function may become an op object (<value>), or back, only in a new version: callers inspect signatures.
        return None if was == now else f" was {was}, is {now}"
    return None if _accepts_all(old, new) else f"{was} became {now}"


def _accepts_all(old: list, new: list) -> bool:
    """True if every call that fits `old` fits `new` and means the same."""
    old_order, new_order = _in_order(old), _in_order(new)
    by_name = {name: (kind, default) for name, kind, default in new}
    if len(new_order) < len(old_order):
        return False
    for (name, kind, default), (new_name, new_kind, new_default) in zip(old_order, new_order, strict=False):
        if default != new_default or (kind == "plain" and (new_name, new_kind) != (name, "plain")):
            return False
    for name, kind, default in old:
        if kind == "keyword-only" and by_name.get(name) not in (
            ("keyword-only", default),
            ("plain", default),
        ):
            return False
        if kind in ("*", "**") and kind not in [new_kind for _, new_kind, _ in new]:
            return False
        if kind == "*" and len(new_order) != len(old_order):
            return False
    old_names = {name for name, _, _ in old}
    added = new_order[len(old_order) :] + [parameter for parameter in new if parameter[1] == "keyword-only"]
    return all(default is not None for name, _, default in added if name not in old_names)


def _in_order(parameters: list) -> list:
    return [parameter for parameter in parameters if parameter[1] in ("positional-only", "plain")]
