"""A swapped model on device tpu, with fake tensors: every layer takes the Pallas path, and shapes come out right."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import torch
import torch_tpu._loader
torch_tpu._loader._init_device("tpu")
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import KernelConfig
from layers_models import tiny
import pallas_hub
from pallas_hub.registry.load import load_source, loaded_from

def onto_tpu(model):
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                fake = torch.empty(weight.shape, dtype=weight.dtype, device="tpu")
                module._parameters[name] = torch.nn.Parameter(fake)

norms, experts = load_source("rms-norm"), load_source("moe-experts")
router_experts = {"qwen3_moe": 8, "gemma4": 4}
for name in router_experts:
    model = tiny(name)
    kernels = {"RMSNorm": norms, "experts": experts, "router": experts}
    pallas_hub.kernelize(model, kernels=kernels, device="tpu")  # where it will run
    with FakeTensorMode(), torch.no_grad():
        layer = model.model.layers[0]
        parts = [layer.input_layernorm, layer.self_attn.q_norm]
        parts += [layer.mlp.experts] if name == "qwen3_moe" else [layer.self_attn.v_norm, layer.experts]
        onto_tpu(layer)
        for part in parts:
            width = part.weight.shape[0] if hasattr(part, "weight") else 8
            x = torch.empty(18, 32 if hasattr(part, "down_proj") else width, device="tpu")
            index, weights = torch.empty(18, 2, dtype=torch.int64, device="tpu"), torch.empty(18, 2, device="tpu")
            y = part(x, index, weights) if hasattr(part, "down_proj") else part(x)
            assert y.device.type == "tpu" and y.shape == x.shape and y.dtype == x.dtype
        router = layer.mlp.gate if name == "qwen3_moe" else layer.router
        for part, columns in zip(router(torch.empty(18, 32, device="tpu")), (router_experts[name], 2, 2), strict=True):
            assert part.device.type == "tpu" and part.shape == (18, columns)
        rows = [row for row in pallas_hub.explain(layer) if row.swapped]
        assert {row.runs for row in rows} == {"pallas"}
        assert [row.layer for row in rows].count("router_topk") == 1

model = tiny("llama")
with FakeTensorMode():
    onto_tpu(model)
    local = loaded_from(norms).path.parents[1]
    mapping = {"RMSNorm": {"tpu": f"{local}:RMSNorm"}}
    model.set_use_kernels(True, KernelConfig(mapping, use_local_kernel=True))
    norm = model.model.norm
    assert "_rms_norm_v1_" in norm.forward.__func__.__module__, norm.forward
    assert norm(torch.empty(2, 5, 32, device="tpu")).device.type == "tpu"
print("swapped layers on tpu: ok")
"""


def test_swapped_layers_take_the_pallas_path_on_tpu():
    """Nothing is run: fake tensors have shapes and a device, no values."""
    pytest.importorskip("torch_tpu", reason="skipped: needs torch_tpu")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "JAX_PLATFORMS": "cpu",
        # What libtpu would otherwise ask the network for.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "swapped layers on tpu: ok" in ran.stdout, ran.stderr[-3000:]
