"""Routers in kernelize: left alone off TPUs, swapped for a TPU, the same results and gradients, and what is refused."""

from __future__ import annotations

import copy
import types

import moe_experts
import pytest
import torch
from layers_models import ids, tiny
from moe_experts._bridge import record_paths, use_path
from torch import nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from pallas_hub import explain, kernelize, unkernelize
from pallas_hub.layers import routers
from pallas_hub.layers.place import kind_of

HIDDEN, EXPERTS, TOP_K = 32, 16, 4
ONLY_ROUTERS = {"router": moe_experts, "RMSNorm": None, "experts": None, "attention": None}
NAMES = ("qwen3_moe", "mixtral", "gemma4", "gpt_oss")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def for_tpu(model, **options):
    """As on a TPU, where routers are swapped; the kernel itself then runs in torch, or interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers, "DEVICES", ("tpu", "cpu"))
        return kernelize(model, **{"kernels": ONLY_ROUTERS, **options})


def router(cls=Qwen3MoeTopKRouter, **given) -> nn.Module:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, **given)
    made = cls(config)
    made.weight.data.copy_(draw(EXPERTS, HIDDEN, seed=1) * 0.3)
    return made


def routers_of(model):
    return [row for row in explain(model) if "Router" in row.original]


def test_on_cpu_routers_stay_as_they_are_and_the_report_says_why():
    model = tiny("qwen3_moe")
    before = [dict(module.__dict__) for module in model.modules() if routers.is_router(module)]
    with pytest.warns(match="none of the"):
        report = kernelize(model, kernels=ONLY_ROUTERS)
    rows = [row for row in report if row.original == "Qwen3MoeTopKRouter"]
    assert len(rows) == 2
    for row in rows:
        assert not row.swapped
        assert row.reason == (
            'it stays torch code on cpu, where a kernel gains nothing; kernelize(model, device="tpu") swaps it before '
            "a move to a TPU"
        )
    assert [dict(module.__dict__) for module in model.modules() if routers.is_router(module)] == before


@pytest.mark.parametrize("name", NAMES)
def test_for_a_tpu_every_router_is_swapped_and_undone(name):
    model = tiny(name)
    found = [module for module in model.modules() if kind_of(module) == "router"]
    before = [dict(module.__dict__) for module in found]
    report = for_tpu(model)
    rows = routers_of(model)
    assert len(found) == len(rows) == len(report.swapped) > 0
    assert {(row.kernel, row.layer, row.runs) for row in rows} == {("moe_experts", "router_topk", "torch")}
    unkernelize(model)
    assert [dict(module.__dict__) for module in found] == before


@pytest.mark.parametrize("path", ["torch", "interpret"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_of_a_model_are_the_same(name, path):
    model, swapped = tiny(name), tiny(name)
    for_tpu(swapped)
    results = []
    for each in (model, swapped):
        with use_path(path), record_paths() as ran:
            output = each(ids(), labels=ids())
            output.loss.backward()
        results.append((output.logits, *(p.grad for p in each.parameters() if p.grad is not None)))
    assert [op for op in ran if op[0] == "moe_experts::router_topk"] == [("moe_experts::router_topk", path)] * 2
    for got, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_router_logits_of_a_model_are_kept(name):
    model, swapped = tiny(name), tiny(name)
    for_tpu(swapped)
    wanted = model(ids(), output_router_logits=True, labels=ids())
    got = swapped(ids(), output_router_logits=True, labels=ids())
    assert len(got.router_logits) == 2
    for one, other in zip(got.router_logits, wanted.router_logits, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(got.aux_loss, wanted.aux_loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_have_the_values_dtypes_and_order_of_the_original(dtype):
    original = router(norm_topk_prob=True).to(dtype)
    swapped = copy.deepcopy(original)
    for_tpu(swapped)
    x = draw(2, 5, HIDDEN, seed=3).to(dtype)
    for got, wanted in zip(swapped(x), original(x), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_under_autocast_the_original_runs():
    original = router(norm_topk_prob=True)
    swapped = copy.deepcopy(original)
    for_tpu(swapped)
    x = draw(5, HIDDEN, seed=3)
    with torch.autocast("cpu", torch.bfloat16), record_paths() as ran:
        results = swapped(x), original(x)
    assert ran == []
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_what_the_router_is_told_later_counts():
    swapped = router()
    for_tpu(swapped)
    swapped.top_k = 2
    assert swapped(draw(3, HIDDEN))[2].shape == (3, 2)


def test_compiled_it_is_one_graph():
    torch._dynamo.reset()
    swapped = router(norm_topk_prob=True)
    for_tpu(swapped)
    compiled = torch.compile(swapped, fullgraph=True, backend="eager")
    for got, wanted in zip(compiled(draw(5, HIDDEN)), swapped(draw(5, HIDDEN)), strict=True):
        torch.testing.assert_close(got, wanted)
    torch._dynamo.reset()


def test_verify_compares_each_router_with_its_original():
    model = tiny("gemma4")
    report = for_tpu(model, verify=True)
    assert len(report.swapped) == 2
    assert all(row.within_tolerance for row in report.swapped), report
    assert report.largest_error.max_rel_error < 1e-5


def changed(change):
    """A class of Transformers whose forward was changed a little, by name a router still."""

    class ChangedTopKRouter(Qwen3MoeTopKRouter):
        def forward(self, hidden_states):
            return change(self, *super().forward(hidden_states))

    ChangedTopKRouter.forward.__module__ = Qwen3MoeTopKRouter.__module__
    ChangedTopKRouter.choose = lambda self, x: x.topk(1)  # as the original: by name, it chooses
    return router(ChangedTopKRouter)


def noisy(self, logits, weights, index):
    return logits, weights * (1 + self.training * 0.01), index


def counting(self, logits, weights, index):
    self.seen += index.shape[0]
    return logits, weights, index


REFUSED = {
    "weights one percent larger": (
        lambda self, logits, weights, index: (logits, weights * 1.01, index),
        "its forward computes something else than any rule of router_topk, in float32 and float32",
    ),
    "another expert": (
        lambda self, logits, weights, index: (logits, weights, (index + 1) % EXPERTS),
        "its forward computes something else than any rule of router_topk, in float32 and float32",
    ),
    "logits halved": (
        lambda self, logits, weights, index: (logits / 2, weights, index),
        "its forward computes something else than any rule of router_topk, in float32 and float32",
    ),
    "noise in training": (noisy, "its forward computes something else in training"),
    "two results": (
        lambda self, logits, weights, index: (weights, index),
        "its forward returns something else than logits, weights and index of the chosen",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_router_that_differs_is_not_replaced(what):
    change, reason = REFUSED[what]
    model = nn.Sequential(changed(change))
    with pytest.warns(match="none of the 1 layers"):
        report = for_tpu(model)
    assert [(row.swapped, row.reason) for row in report] == [(False, reason)]
    assert "forward" not in model[0].__dict__


def test_a_router_that_counts_is_not_replaced():
    model = nn.Sequential(changed(counting))
    model[0].register_buffer("seen", torch.zeros(()))
    with pytest.warns(match="its forward changes its buffers"):
        for_tpu(model)


def test_other_reasons_to_leave_a_router_alone():
    class Router(nn.Module):
        def forward(self, x):
            return x.topk(1)

    kept = router()
    kept.forward = types.MethodType(lambda self, x: x, kept)
    empty = Qwen3MoeTopKRouter.__new__(Qwen3MoeTopKRouter)
    nn.Module.__init__(empty)
    empty.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN, device="meta"))
    with pytest.warns(match="none of the 3 layers"):
        report = for_tpu(nn.ModuleList([Router(), kept, empty]))
    assert [row.reason for row in report] == [
        f"its forward is defined in {__name__}, not in Transformers",
        "its forward was already replaced on the instance",
        "weight is on the meta device; load the model first",
    ]


def test_a_kernel_that_computes_something_else_is_not_put_in():
    def router_topk(logits, **options):
        weights, index = moe_experts.router_topk(logits, **options)
        return weights * 1.001, index

    kernel = types.ModuleType("wrong")
    kernel.router_topk = router_topk
    model = nn.Sequential(router())
    with pytest.warns(match="none of the"):
        report = for_tpu(model, kernels={**ONLY_ROUTERS, "router": kernel})
    assert [row.reason for row in report] == ["the kernel's router_topk computes something else"]


def test_a_kernel_without_a_router_is_refused():
    kernel = types.ModuleType("empty")
    kernel.other = 1
    with pytest.raises(ValueError, match=r"kernel empty must have router_topk; it has: other\."):
        for_tpu(nn.Sequential(router()), kernels={**ONLY_ROUTERS, "router": kernel})


def test_told_to_leave_routers_alone():
    model = tiny("mixtral")
    kernelize(model, kernels={"RMSNorm": None, "experts": moe_experts, "router": None})
    assert {row.reason for row in routers_of(model)} == {"kernelize was told to leave router layers alone"}
