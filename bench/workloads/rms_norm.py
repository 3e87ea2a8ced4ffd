"""RMS normalization: the rms-norm kernel against Transformers' module, torch's own, torch.compile and plain JAX."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallas_hub.bench.case import Case, Implementation, without_gradients
from pallas_hub.bench.checks import tolerance_for
from pallas_hub.bench.workloads.streams import streaming_copy

KERNEL = "rms-norm"
EPS = 1e-6
DTYPES = ("bfloat16", "float32")
TOKENS = (1, 64, 2048)

DEFAULT_WORKLOAD = "mixed"

# Tokens -> width of a row. Numbers of tokens that are not listed take the largest width.
_WIDTHS = {
    "mixed": {1: 2048, 64: 4096, 2048: 4096},
    "small": {1: 64, 64: 128, 2048: 128},
}


def workloads(kernel: Any) -> dict[str, dict[int, int]]:
    """A mix of sizes, a small one to try the benchmark with, and the models in the kernel's own cases.py.

    Models that take another order of rounding (Gemma) are left out: not every rival here can do it.
    """
    try:
        listed = importlib.import_module(f"{kernel.__name__}.cases").MODEL_CASES
    except (ImportError, AttributeError):
        listed = ()
    widths = {name: dict(sizes) for name, sizes in _WIDTHS.items()}
    for case in listed:
        if not (case.zero_centered or case.float32_scale or case.residual):
            widths.setdefault(case.name.removesuffix(f"-{case.m}"), {})[case.m] = case.n
    return widths


def cases(
    kernel: Any, workload: str, dtypes: Sequence[str], tokens: Sequence[int], everything: bool = False
) -> Iterator[Case]:
    """One case per dtype and number of tokens. Every rival is always in."""
    import torch

    widths = workloads(kernel)[workload]
    for dtype_name in dtypes:
        for m in tokens:
            yield _case(kernel, workload, m, widths.get(m, max(widths.values())), getattr(torch, dtype_name))


def _case(kernel: Any, workload: str, m: int, n: int, dtype: Any) -> Case:
    import torch

    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, n, generator=generator).to(dtype)
    weight = (1 + 0.1 * torch.randn(n, generator=generator)).to(dtype)
    implementations, unavailable = _implementations(kernel, x, weight)
    return Case(
        workload=f"RMS normalization, {workload}",
        sizes={"m": m, "n": n},
        dtype=str(dtype).removeprefix("torch."),
        exact=lambda: exact_rms_norm(x, weight),
        tolerance=tolerance_for(dtype, n),
        least_bytes=2 * x.nbytes + weight.nbytes,
        stream=streaming_copy(x, torch.empty_like(x)),
        stream_name="streaming copy of x",
        implementations=implementations,
        unavailable=unavailable,
    )


def exact_rms_norm(x: Any, weight: Any) -> Any:
    """The definition in float64."""
    import torch

    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def _implementations(kernel: Any, x: Any, weight: Any) -> tuple[list[Implementation], dict[str, str]]:
    from torch.nn import functional

    n = x.shape[-1]
    rows = [
        Implementation("rms_norm", lambda: kernel.rms_norm(x, weight, eps=EPS), ours=True),
        Implementation(
            "torch F.rms_norm",
            lambda: functional.rms_norm(x, (n,), weight, EPS),
            telling_ops=("aten::_fused_rms_norm", "aten::rsqrt"),
        ),
    ]
    unavailable: dict[str, str] = {}
    for name, build in (
        ("Transformers eager", _transformers_module),
        ("torch.compile", _compiled),
        ("jitted JAX, no Pallas", _jitted_jax),
    ):
        try:
            call, path = build(kernel, x, weight)
            rows.append(Implementation(name, call, path=path))
        except Unavailable as reason:
            unavailable[name] = str(reason)
    return [without_gradients(row) for row in rows], unavailable


class Unavailable(Exception):
    """A rival cannot run here; the text says why and stands in the table."""


def _transformers_module(kernel: Any, x: Any, weight: Any) -> tuple[Callable[[], Any], str]:
    try:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
    except ImportError as error:
        raise Unavailable(f"Transformers cannot be imported: {error}") from error
    import torch

    module = LlamaRMSNorm(x.shape[-1], eps=EPS).to(x.dtype)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return lambda: module(x), "LlamaRMSNorm.forward"


def _compiled(kernel: Any, x: Any, weight: Any) -> tuple[Callable[[], Any], str]:
    """The eager module through torch.compile: what a user without a kernel would try first."""
    compiler = next((c for c in (os.environ.get("CXX"), "g++", "clang++") if c and shutil.which(c)), None)
    if compiler is None:
        raise Unavailable("torch.compile needs a C++ compiler (g++, clang++ or $CXX); none was found")
    import torch

    eager, _ = _transformers_module(kernel, x, weight)
    return torch.compile(eager, fullgraph=True), f"inductor, {compiler}"


def _jitted_jax(kernel: Any, x: Any, weight: Any) -> tuple[Callable[[], Any], str]:
    """The kernel's own reference (plain jax.numpy), jitted, on arrays that JAX owns."""
    try:
        import jax
    except ImportError as error:
        raise Unavailable(f"JAX cannot be imported: {error}") from error
    try:
        reference = importlib.import_module(f"{kernel.__name__}.reference").rms_norm
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"this kernel has no reference.rms_norm to jit: {error}") from error
    cpu = jax.devices("cpu")[0]
    x_jax, weight_jax = (jax.device_put(jax.dlpack.from_dlpack(t), cpu) for t in (x, weight))
    jitted = jax.jit(lambda x, weight: reference(x, weight, eps=EPS))
    return lambda: jitted(x_jax, weight_jax), "XLA CPU"
