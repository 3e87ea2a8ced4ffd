"""Diffusers' own RMSNorm, which rounds to the dtype of its weight and not to that of its input."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.normalization import RMSNorm

import pallas_hub
from pallas_hub.layers import norms


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_swapped_norm_gives_the_same_bits(dtype, weight_dtype):
    layer = RMSNorm(40, eps=1e-6).to(weight_dtype)
    torch.manual_seed(0)
    x = torch.randn(3, 5, 40).to(dtype)
    with torch.no_grad():
        layer.weight.normal_()
        wanted = layer(x)
        (row,) = pallas_hub.kernelize(layer)
        assert row.layer == "RMSNormWeightDtype"
        came = layer(x)
    assert came.dtype == wanted.dtype == weight_dtype
    torch.testing.assert_close(came, wanted, rtol=1e-6 if weight_dtype == torch.float32 else 0.0, atol=0.0)


def test_without_a_weight_it_rounds_to_its_input():
    assert norms.recognise(RMSNorm(40, eps=1e-6, elementwise_affine=False)).layer == "RMSNormNoScale"


def test_with_a_bias_it_is_left_alone():
    assert norms.recognise(RMSNorm(40, eps=1e-6, bias=True)) == "it has tensors that are no weight: bias"
