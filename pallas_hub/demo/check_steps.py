"""Steps of the demo that check the loaded kernels against float64: as users call them, and interpreted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from pallas_hub.demo.state import Demo, Step, require


def check_kernels(demo: Demo, step: Step) -> None:
    """Check values and gradients against float64"""
    for label, got, exact, tolerance in [*_norm_checks(demo), *_experts_checks(demo)]:
        _compare(demo, step, label, got, exact, tolerance)


def check_interpreted(demo: Demo, step: Step) -> None:
    """Run the Pallas TPU kernels themselves, interpreted on the CPU, and check them too"""
    from pallas_hub.bench.loading import record_paths_of

    os.environ["PALLAS_HUB_INTERPRET"] = "1"
    try:
        with ExitStack() as stack:
            ran = [stack.enter_context(record_paths_of(kernel)()) for kernel in demo.kernels.values()]
            for label, got, exact, tolerance in [*_norm_checks(demo, m=12, n=256), *_experts_checks(demo, tokens=3)]:
                _compare(demo, step, f"{label}, interpreted", got, exact, tolerance)
    finally:
        del os.environ["PALLAS_HUB_INTERPRET"]
    for name, calls in zip(demo.kernels, ran, strict=True):
        paths = {path for _, path in calls}
        require("interpret" in paths, f"{name}: the Pallas kernel did not run; paths taken: {paths or 'none'}")


def _compare(demo: Demo, step: Step, label: str, got: Any, exact: Any, tolerance: float) -> None:
    from pallas_hub.bench.checks import compare

    check = compare(got, exact, tolerance)
    step.facts[label] = {"error": check.error, "tolerance": tolerance}
    require(check.passed, f"{label}: {check.problem}")
    demo.say(f"      {label}: largest error {check.error:.1e} (allowed {tolerance:.1e})")


def _norm_checks(demo: Demo, m: int = 64, n: int = 2048) -> Iterator[tuple[str, Any, Any, float]]:
    """(label, result, exact result, tolerance) of rms_norm and of its gradient for x."""
    import torch

    from pallas_hub.bench.checks import tolerance_for
    from pallas_hub.bench.workloads.rms_norm import EPS, exact_rms_norm

    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(m, n, generator=generator).to(dtype).requires_grad_()
        weight = (1 + 0.1 * torch.randn(n, generator=generator)).to(dtype)
        wide = x.detach().double().requires_grad_()
        y, exact = demo.kernels["rms-norm"].rms_norm(x, weight, EPS), exact_rms_norm(wide, weight)
        upstream = torch.randn(m, n, generator=generator).to(dtype)
        (gradient,) = torch.autograd.grad(y, x, upstream)
        (exact_gradient,) = torch.autograd.grad(exact, wide, upstream.double())
        name, tolerance = f"rms_norm ({m}, {n}) {_short(dtype)}", tolerance_for(dtype, n)
        yield name, y, exact.detach(), tolerance
        yield f"{name} gradient", gradient, exact_gradient, tolerance


def _experts_checks(demo: Demo, tokens: int = 33) -> Iterator[tuple[str, Any, Any, float]]:
    """(label, result, exact result, tolerance) of a small experts layer and of its gradient for the hidden states."""
    import torch

    from pallas_hub.bench.checks import tolerance_for
    from pallas_hub.bench.workloads import ragged_dot as workload

    size = workload.SMALL
    for dtype in (torch.float32, torch.bfloat16):
        module = workload.experts_module(size, dtype)
        hidden, index, weights = workload.routed_inputs(size, dtype, tokens)
        hidden, wide = hidden.requires_grad_(), hidden.detach().double().requires_grad_()
        arguments = (hidden, module.gate_up_proj, module.down_proj, index, weights)
        y = demo.kernels["ragged-dot"].moe_experts(*arguments)
        exact = workload.exact_experts(module, wide, index, weights)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        (gradient,) = torch.autograd.grad(y, hidden, upstream)
        (exact_gradient,) = torch.autograd.grad(exact, wide, upstream.double())
        name, tolerance = f"moe_experts ({tokens} tokens) {_short(dtype)}", tolerance_for(dtype, size.hidden)
        yield name, y, exact.detach(), tolerance
        yield f"{name} gradient", gradient, exact_gradient, tolerance


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
