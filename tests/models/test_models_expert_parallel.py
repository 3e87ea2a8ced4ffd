"""Experts spread over two processes by Transformers' own expert parallelism, and run by "pallas" there.

With "ep_router" every process sees all tokens, and slots of other processes' experts come marked; with
"ep_dispatch_experts" tokens travel to the process that has their expert.
"""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing
from built_models import Run, build, run, words
from default_kernels import load, products
from moe_models import cases
from precision import assert_same_in_float32

import pallas_hub
from pallas_hub.layers import use_loader

SHARDED = {f"model.layers.*.mlp.experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
PLANS = {
    "router": {**SHARDED, "model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"},
    "dispatch": {**SHARDED, "model.layers.*.mlp.experts": "ep_dispatch_experts"},
}


@pytest.mark.slow  # two more processes that import everything
def test_two_processes_compute_what_one_does(tmp_path):
    torch.multiprocessing.spawn(_check_rank, (str(tmp_path / "store"),), nprocs=2)


def _check_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        with use_loader(load):
            for plan in PLANS:
                _check(plan)
    finally:
        torch.distributed.destroy_process_group()


def _check(plan: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import tensor_parallel  # noqa: F401  (knows "moe_tp_experts")
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    built = build(next(case for case in cases() if str(case) == "qwen3_moe"))
    wanted = built.run("eager")
    mesh = init_device_mesh("cpu", (2,))
    apply_expert_parallelism(built.model, mesh, mesh, PLANS[plan])
    assert {module.num_experts for module in built.experts} == {4}  # of 8

    came = run(built.model, words(2, 9))
    assert len(products(came.ran)) == 2 * len(built.experts)
    assert_same_in_float32(_whole(came), wanted)

    rows = [row for row in pallas_hub.explain(built.model) if row.original == built.case.experts]
    assert [row.layer for row in rows] == ["experts_forward"] * 2
    built.model.set_experts_implementation("eager")
    report = pallas_hub.kernelize(built.model, kernels={"RMSNorm": None}, strict=False)
    assert 'set_experts_implementation("pallas")' in report[rows[0].path].reason


def _whole(came: Run) -> Run:
    gradients = {
        name: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        for name, gradient in came.gradients.items()
    }
    return Run(came.logits, came.loss, gradients, came.routing, came.ran)
