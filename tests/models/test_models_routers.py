"""Every router of the models with experts: found, served by router_topk or named with the reason, the same after it.

As kernelize swaps them for a TPU; here router_topk runs its torch code. In float32, whole models: logits, loss and
gradients. What bfloat16 adds is part of how a rule is recognised (pallas_hub/layers/router_probe.py).
"""

from __future__ import annotations

import pytest
from built_models import run, under, words
from default_kernels import kernel
from precision import assert_same_in_float32

import pallas_hub
from pallas_hub.layers import routers

# By the name of the case: why its router stays. Checked: an entry whose router is served is an error.
NOT_SERVED = {
    "inkling": "its forward returns something else than logits, weights and index of the chosen",
    "phimoe": "its forward computes something else in training",
    "zaya": "its forward takes hidden_states, router_states; the kernel takes tokens, and a bias",
}
# Layers with experts that have no router which chooses, and why.
WITHOUT = {"deepseek_v4": (1, "its first layers route by the number of the token")}
ONLY_ROUTERS = {"RMSNorm": None, "experts": None, "attention": None, "router": kernel}


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    monkeypatch.setattr(routers, "DEVICES", ("tpu", "cpu"))


def found_in(model):
    return [module for module in model.modules() if routers.is_router(module)]


def test_every_experts_layer_has_a_router_that_is_found(built):
    assert len(found_in(built.model)) == len(built.experts) - WITHOUT.get(str(built.case), (0, ""))[0]


@pytest.mark.usefixtures("as_on_a_tpu")
@pytest.mark.filterwarnings("ignore:kernelize. none of the")
def test_served_or_named_and_the_model_computes_the_same(built):
    with under(built.model, "eager"):
        try:
            report = pallas_hub.kernelize(built.model, kernels=ONLY_ROUTERS)
            rows = [report[path] for path, module in built.model.named_modules() if routers.is_router(module)]
            came = run(built.model.train(), words(2, 9))
        finally:
            pallas_hub.unkernelize(built.model)
    reason = NOT_SERVED.get(str(built.case))
    assert {(row.swapped, row.reason) for row in rows} == {(reason is None, reason)}
    ran = [op for op in came.ran if op.endswith("::router_topk")]
    assert bool(ran) == (reason is None)
    assert_same_in_float32(came, built.run("eager"))
