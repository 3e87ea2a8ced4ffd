"""What the torch tests of moe-experts share: a case's arguments as tensors, and the layer as a loop with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from moe_experts.cases import Case
from moe_experts_checks import layer_of, loop, tolerance
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "swiglu_oss": lambda x: x * torch.sigmoid(1.702 * x),
}


def call_of(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
    """Arguments and keywords of moe_experts."""
    tensors = [None if part is None else torch.from_numpy(part) for part in layer_of(case, seed).arguments()]
    *arguments, gate_up_bias, down_bias = [
        tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors
    ]
    keywords = {
        "activation": case.activation,
        "gate": None if case.gate == "none" else case.gate,
        "limit": case.limit,
        "transposed": case.transposed,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    return tuple(arguments), keywords


def exact(case: Case, seed: int = 0) -> Tensor:
    return torch.from_numpy(loop(case, layer_of(case, seed)))


def assert_close(got: Tensor, case: Case, wanted: Tensor, dtype: torch.dtype = torch.float32) -> None:
    atol = tolerance(case, torch.finfo(dtype).eps, wanted.detach().numpy())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)


def loop_over_tokens(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, scores: Tensor, **names: Any) -> Tensor:
    """The layer in plain torch, differentiable: each token, each of its experts, one by one."""
    act, gate, limit = ACTIVATIONS[names["activation"]], names["gate"], names["limit"]
    if names["transposed"]:
        gate_up, down = gate_up.mT, down.mT
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros_like(x[token])
        for slot in range(index.shape[1]):
            expert = int(index[token, slot])
            if expert >= gate_up.shape[0]:
                continue
            y = gate_up[expert] @ x[token]
            y = y if names["gate_up_bias"] is None else y + names["gate_up_bias"][expert]
            if gate is None:
                y = act(y)
            else:
                gates, ups = y.chunk(2) if gate == "concatenated" else (y[::2], y[1::2])
                if limit is not None:
                    gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
                y = act(gates) * (ups + 1 if names["activation"] == "swiglu_oss" else ups)
            y = down[expert] @ y
            y = y if names["down_bias"] is None else y + names["down_bias"][expert]
            row = row + scores[token, slot] * y
        rows.append(row)
    return torch.stack(rows)
