"""Do something as soon as somebody else has imported a module, without importing it.

If the module is there already, it is done at once; if not, a finder on sys.meta_path waits for its import, lets it run,
does it, and takes itself off.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any


def after_import(
    name: str,
    last: str,
    enter: Callable[[ModuleType], None],
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """Call `enter(module)` once the module `name` has run; asking twice is asking once.

    last    a name that the module defines: it is there only when the module has run
    around  a context in which the module is run
    """
    module = sys.modules.get(name)
    if module is not None and hasattr(module, last):
        enter(module)
    elif not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, enter, around))


class _AfterImport:
    """Finds the module once, and lets `enter` follow its execution."""

    def __init__(self, name: str, enter: Callable[[ModuleType], None], around: Callable[[], AbstractContextManager]):
        self.name, self.enter, self.around = name, enter, around

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run_module = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self.around():
                run_module(module)
            self.enter(module)

        spec.loader.exec_module = exec_module
        return spec
