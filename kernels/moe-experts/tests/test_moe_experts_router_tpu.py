"""The router's kernel compiled for real TPUs by libtpu's compiler: compiled, not run."""

from __future__ import annotations

import pytest
from moe_experts_router_checks import ROUTES, Route

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu")
from moe_experts.router_kernel import router_topk_forward  # noqa: E402

from pallas_hub.bench.aot.report import compile_report  # noqa: E402
from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu  # noqa: E402

targets = pytest.mark.parametrize("target", TARGETS)
QWEN = Route(4096, 128, 8, renormalize=True)
DEEPSEEK = Route(64, 256, 8, "sigmoid", True, 2.5, groups=8, top_groups=4, bias=True)
LARGE = [Route(4096, 1024, 8, dtype="bfloat16"), Route(300, 512, 64, bias=True), Route(8, 4096, 2)]


def arguments(route: Route):
    array = jax.ShapeDtypeStruct
    return [array((route.t, route.e), route.dtype), *([array((route.e,), "float32")] if route.bias else [])]


@targets
@pytest.mark.parametrize("route", [QWEN, DEEPSEEK, *ROUTES, *LARGE], ids=lambda route: route.id)
def test_compiles(route, target):
    compiled = compile_for_tpu(router_topk_forward, *arguments(route), target=target, **route.options)
    assert "router_topk" in compiled.as_text()


@pytest.mark.parametrize("route", [QWEN, DEEPSEEK], ids=lambda route: route.id)
def test_scores_stay_in_registers(route, tmp_path):
    reports = compile_report(
        router_topk_forward, arguments(route), target=list(TARGETS), workers=1, cache=tmp_path, **route.options
    )
    for report in reports:
        assert report.status == "compiled"
        assert report.spills == 0, report.target
