"""Kernels in plain torch with the public API of rms-norm and ragged-dot: they count calls and can be made wrong."""

from __future__ import annotations

import types

import torch
from torch import nn


def norm_kernel(*, differentiable=True, compilable=True, wrong_by=0.0, float32_scale=True) -> types.ModuleType:
    """A module like kernels/rms-norm. `calls` holds the shapes that reached the kernel."""
    kernel = types.ModuleType("fake_rms_norm")
    kernel.calls = []

    def compute(x, weight, eps, zero_centered, late):
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        if zero_centered or late:
            return ((weight.float() + (1.0 if zero_centered else 0.0)) * unit).to(x.dtype) + wrong_by
        return weight * unit.to(x.dtype) + wrong_by

    def run(x, weight, eps, zero_centered, late):
        if not torch.compiler.is_compiling():
            kernel.calls.append(tuple(x.shape))
        if differentiable:
            return compute(x, weight, eps, zero_centered, late)
        with torch.no_grad():  # loses the gradient without a word: the worst a kernel can do
            return compute(x, weight, eps, zero_centered, late)

    if float32_scale:

        def rms_norm(x, weight, eps=1e-6, *, zero_centered=False, float32_scale=False):
            return run(x, weight, eps, zero_centered, float32_scale)
    else:

        def rms_norm(x, weight, eps=1e-6, *, zero_centered=False):
            return run(x, weight, eps, zero_centered, False)

    class RMSNorm(nn.Module):
        can_torch_compile = compilable
        has_backward = differentiable

        def forward(self, hidden_states):
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    class RMSNormZeroCentered(nn.Module):
        can_torch_compile = compilable
        has_backward = differentiable

        def forward(self, hidden_states):
            return rms_norm(hidden_states, self.weight, self.eps, zero_centered=True)

    kernel.rms_norm = rms_norm
    kernel.layers = types.SimpleNamespace(RMSNorm=RMSNorm, RMSNormZeroCentered=RMSNormZeroCentered)
    return kernel


def experts_kernel(*, differentiable=True, wrong_by=0.0, name="fake_ragged_dot") -> types.ModuleType:
    """A module like kernels/ragged-dot: experts one after the other, weights read through the layer."""
    kernel = types.ModuleType(name)
    kernel.calls = []

    def compute(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in range(self.num_experts):
            weight = (top_k_weights * (top_k_index == expert)).sum(-1)
            up, down = self.gate_up_proj[expert], self.down_proj[expert]
            if not self.is_transposed:
                up, down = up.T, down.T
            hidden = hidden_states.to(up.dtype) @ up
            if self.has_bias:
                hidden = hidden + self.gate_up_proj_bias[expert]
            y = self._apply_gate(hidden) @ down
            if self.has_bias:
                y = y + self.down_proj_bias[expert]
            out = out + (y * weight[:, None]).float()
        return out.to(hidden_states.dtype) + wrong_by

    def experts_forward(self, hidden_states, top_k_index, top_k_weights):
        if not torch.compiler.is_compiling():
            kernel.calls.append(tuple(hidden_states.shape))
        if differentiable:
            return compute(self, hidden_states, top_k_index, top_k_weights)
        with torch.no_grad():
            return compute(self, hidden_states, top_k_index, top_k_weights)

    experts_forward.has_backward = differentiable
    kernel.experts_forward = experts_forward
    return kernel


def fakes(**options) -> dict[str, types.ModuleType]:
    """For kernelize(kernels=...)."""
    return {"RMSNorm": norm_kernel(**options), "experts": experts_kernel(**options)}
