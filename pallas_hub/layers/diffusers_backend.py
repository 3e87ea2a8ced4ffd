"""set_attention_backend("pallas"): the entry in Diffusers' own table of attention backends.

    import pallas_hub                                            # before or after diffusers
    pipe.transformer.set_attention_backend("pallas")             # or "pallas-hub/flash-attention"

Diffusers keeps the names in an enum and the functions in a registry, both in diffusers.models.attention_dispatch. They
get our entries when that module is imported, or at once if it is already. Neither Diffusers nor torch is imported for
this. The kernel itself is loaded at the first call, or by kernelize.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from pallas_hub.layers.after_import import after_import
from pallas_hub.layers.loading import ATTENTION, DEFAULT_REPOS, Kernel, load_kernel, parse_choice

NAME = "pallas"
NAMES = (NAME, DEFAULT_REPOS[ATTENTION])  # two names of one backend
_TABLE_MODULE = "diffusers.models.attention_dispatch"
_NEEDED = ("AttentionBackendName", "_AttentionBackendRegistry", "_check_device", "_check_shape")


def register() -> None:
    """Enter our names in Diffusers' table of attention backends. Imports Diffusers; twice is the same as once."""
    _enter(_dispatch())


def register_when_imported() -> None:
    """Do what register() does, as soon as somebody else imports Diffusers' attention."""
    after_import(_TABLE_MODULE, "dispatch_attention_fn", _enter, around=_variable_set_aside)


def backend_for(kernel: Kernel, *, default: bool) -> Any:
    """The backend that runs this kernel: "pallas" if it is what nobody chose."""
    register()
    if default and _KERNELS[NAME].module in (None, kernel.module):
        _KERNELS[NAME] = kernel
        return backend_named(NAME)
    name = f"{NAME}:{kernel.repo_id}" + ("" if kernel.version is None else f"@{kernel.version}")
    taken, number = name, 1
    while name in _KERNELS and _KERNELS[name].module is not kernel.module:  # other code of that repo
        number += 1
        name = f"{taken}#{number}"
    _add_backend(_dispatch(), name, kernel)
    return backend_named(name)


def backend_named(name: str) -> Any:
    """The member of Diffusers' enum. Pickles of it hold a call of this, which enters missing names."""
    register()
    if name.startswith(f"{NAME}:") and name not in _KERNELS:
        choice = name.removeprefix(f"{NAME}:").split("#")[0]
        _add_backend(_dispatch(), name, Kernel(*parse_choice(choice), None, None))
    return _dispatch().AttentionBackendName(name)


def kernel_behind(backend: str | None) -> Kernel | None:
    """The kernel that Diffusers runs under this backend; None for a backend of its own. Loads nothing."""
    return _KERNELS.get(backend)


def kernel_of(name: str) -> Kernel:
    """The same, loaded."""
    kernel = _KERNELS[name]
    if kernel.module is None:
        version = "" if kernel.version is None else f"@{kernel.version}"
        kernel = _KERNELS[name] = load_kernel(f"{kernel.repo_id}{version}")
    return kernel


_KERNELS: dict[str | None, Kernel] = {}  # name of a backend -> its kernel, without the module until it is loaded


def _dispatch() -> Any:
    from diffusers.models import attention_dispatch

    return attention_dispatch


def _enter(dispatch: ModuleType) -> None:
    missing = [name for name in _NEEDED if not hasattr(dispatch, name)]
    if missing:  # importing Diffusers must go on all the same
        warnings.warn(
            f'pallas_hub: set_attention_backend("{NAME}") is not available: {_TABLE_MODULE} of this version of '
            f"diffusers has no {missing[0]}. Try: pip install diffusers==0.42.1",
            stacklevel=2,
        )
        return
    for name in NAMES:
        _add_backend(dispatch, name, Kernel(DEFAULT_REPOS[ATTENTION], None, None, None))
    _follow_variable(dispatch)


def _add_backend(dispatch: ModuleType, name: str, kernel: Kernel) -> None:
    if name in _KERNELS:
        return
    from pallas_hub.layers.diffusers_attention import attention_function

    _KERNELS[name] = kernel
    backend = _member(dispatch.AttentionBackendName, name)
    register_backend = dispatch._AttentionBackendRegistry.register(
        backend,
        constraints=[dispatch._check_device, dispatch._check_shape],  # as for the native backend
        supports_context_parallel=True,
    )
    register_backend(attention_function(name))


def _member(names: Any, value: str) -> Any:
    """The member of the enum `names` for `value`, which is made if it is missing."""
    if value in names._value2member_map_:
        return names(value)
    key = value.upper()
    member = str.__new__(names, value)
    member._name_, member._value_ = key, value
    member.__objclass__, member._sort_order_ = names, len(names._member_names_)
    # Where the name is not entered yet, a pickle must enter it; Enum's own would ask the enum at once.
    member.__reduce_ex__ = lambda protocol: (backend_named, (value,))
    setattr(names, key, member)
    names._member_names_.append(key)
    names._member_map_[key] = member
    names._value2member_map_[value] = member
    return member


@contextmanager
def _variable_set_aside() -> Generator[None]:
    """Diffusers checks DIFFUSERS_ATTN_BACKEND while its module runs, when our names cannot be there yet."""
    from diffusers.utils import constants

    wanted = constants.DIFFUSERS_ATTN_BACKEND
    if wanted in NAMES:
        constants.DIFFUSERS_ATTN_BACKEND = "native"
    try:
        yield
    finally:
        constants.DIFFUSERS_ATTN_BACKEND = wanted


def _follow_variable(dispatch: Any) -> None:
    """Do what Diffusers would have done with DIFFUSERS_ATTN_BACKEND, had it not been set aside."""
    from diffusers.utils import constants

    wanted = constants.DIFFUSERS_ATTN_BACKEND
    if wanted in NAMES and wanted != dispatch.DIFFUSERS_ATTN_BACKEND:
        dispatch.DIFFUSERS_ATTN_BACKEND = wanted
        dispatch._AttentionBackendRegistry.set_active_backend(_member(dispatch.AttentionBackendName, wanted))
