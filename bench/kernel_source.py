"""Load the JAX files of a kernel folder without its torch half.

`kernel.py`, `config.py`, `reference.py` and `cases.py` need no torch, and are used where there is none: by the compile
reports and by the tests with the newest JAX. The package `__init__.py` (which imports torch) is not run.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

KERNELS = Path(__file__).resolve().parent.parent / "kernels"


def kernel_folder(name: str) -> Path:
    """The Python package of kernel `name`, e.g. kernels/rms-norm/torch-ext/rms_norm.

    Raises   ValueError: there is no such kernel; the message lists those there are.
    """
    folder = KERNELS / name / "torch-ext" / name.replace("-", "_")
    if not folder.is_dir():
        there_are = ", ".join(sorted(path.parent.name for path in KERNELS.glob("*/torch-ext")))
        raise ValueError(f"no kernel {name!r}; there are: {there_are}")
    return folder


def load_jax_module(name: str, module: str) -> ModuleType:
    """Import e.g. load_jax_module("rms-norm", "kernel"); relative imports inside work.

    Raises   ValueError: no such kernel.  ImportError: the module needs something that is missing.
    """
    folder = kernel_folder(name)
    package = f"_pallas_hub_source_{folder.name}"
    if package not in sys.modules:
        _stand_in(package, folder)
        for link in folder.iterdir():  # kernels that this one holds; their __init__.py imports torch as well
            if link.is_symlink() and link.is_dir() and link.name != "_bridge":
                _stand_in(f"{package}.{link.name}", link)
    return importlib.import_module(f"{package}.{module}")


def _stand_in(package: str, folder: Path) -> None:
    module = ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module
