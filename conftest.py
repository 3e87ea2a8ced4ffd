"""Set the environment before torch and JAX are first imported, and make the kernels' sources importable by name."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# torch would load torch_tpu on import, which looks for TPU hardware.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# No test may reach a real Hub: the server of this project is used, or none.
os.environ.setdefault("HF_ENDPOINT", "http://127.0.0.1:9")

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:  # how long it takes to draw an example says something about the machine, and nothing about the code
    settings.register_profile("pallas-hub", suppress_health_check=[HealthCheck.too_slow], deadline=None)
    settings.load_profile("pallas-hub")


def _offer_kernel(folder: Path) -> None:
    """`import rms_norm` in a test is kernels/rms-norm/torch-ext/rms_norm: the files that every build holds.

    Where torch is missing (the environment with the newest JAX), an empty package stands in for the kernel's own
    `__init__.py`, and the JAX modules below it can still be imported.
    """
    sys.path.insert(0, str(folder))
    if importlib.util.find_spec("torch") is None:
        (package,) = (path.parent for path in folder.glob("*/__init__.py"))
        _stand_in(package.name, package)
        for link in package.iterdir():  # other kernels that this one vendors; _bridge needs no torch
            if link.is_symlink() and link.is_dir() and link.name != "_bridge":
                _stand_in(f"{package.name}.{link.name}", link)


def _stand_in(name: str, package: Path) -> None:
    module = ModuleType(name)
    module.__path__ = [str(package)]
    sys.modules[name] = module


for _folder in sorted(Path(__file__).parent.glob("kernels/*/torch-ext")):
    _offer_kernel(_folder)
