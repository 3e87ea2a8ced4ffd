"""What is refused, and in which words."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["auto", "torch"])
def rms_norm(request, rms_norm_kernel, part):
    with part("_bridge").use_path(request.param):
        yield rms_norm_kernel.rms_norm


def test_rejects_weight_of_another_width(rms_norm):
    message = r"rms_norm: weight must be \(n,\) = \(64,\) to match x \(\.\.\., n\) = \(8, 64\); got \(32,\)"
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.ones(8, 64), torch.ones(32))


def test_rejects_weight_of_two_axes(rms_norm):
    with pytest.raises(ValueError, match=r"got \(8, 64\)\. Only the last axis is normalised\."):
        rms_norm(torch.ones(2, 8, 64), torch.ones(8, 64))


@pytest.mark.parametrize("order", [{}, {"zero_centered": True}, {"float32_scale": True}])
def test_rejects_weight_of_one_entry(rms_norm, order):
    """It would broadcast."""
    with pytest.raises(ValueError, match=r"weight must be \(n,\) = \(64,\).*got \(1,\)"):
        rms_norm(torch.ones(8, 64), torch.ones(1), **order)


def test_rejects_float64(rms_norm):
    message = r"rms_norm: x is float64; supported: float32, bfloat16, float16\. Try x\.to\(torch\.float32\)\."
    with pytest.raises(TypeError, match=message):
        rms_norm(torch.ones(8, 64, dtype=torch.float64), torch.ones(64))
    with pytest.raises(TypeError, match=r"rms_norm: weight is int64; supported: .* Try weight\.to"):
        rms_norm(torch.ones(8, 64), torch.ones(64, dtype=torch.int64))


def test_rejects_scalar(rms_norm):
    with pytest.raises(ValueError, match=r"x must be \(\.\.\., n\) with at least one axis; got a scalar"):
        rms_norm(torch.tensor(1.0), torch.ones(1))
    with pytest.raises(ValueError, match=r"got a scalar"):
        rms_norm(torch.tensor(1.0), None)


def test_rejects_residual_of_another_shape_or_dtype(rms_norm):
    x, weight = torch.ones(8, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"residual must be shaped like x \(\.\.\., n\) = \(8, 64\); got \(64,\)"):
        rms_norm(x, weight, residual=torch.ones(64))
    with pytest.raises(TypeError, match=r"residual must have x\.dtype = float32; got bfloat16\. Try residual\.to"):
        rms_norm(x, weight, residual=x.bfloat16())


def test_rejects_two_devices(rms_norm):
    x, weight = torch.ones(8, 64), torch.ones(64, device="meta")
    with pytest.raises(ValueError, match=r"one device; got x on cpu, weight on meta\. Try weight\.to\(x\.device\)"):
        rms_norm(x, weight)
    with pytest.raises(ValueError, match=r"one device; got x on cpu, residual on meta"):
        rms_norm(x, torch.ones(64), residual=torch.ones(8, 64, device="meta"))


def test_rejects_rows_that_no_block_holds(part):
    config = part("config")
    streams = config.forward_streams(4, 4, residual=False)
    with pytest.raises(config.NoConfig, match=r"rows of n = 4194304 need 128\.\d MiB of TPU memory.*Split the last"):
        config.choose(8, 1 << 22, streams)


@pytest.mark.parametrize(
    ("arguments", "residual"),
    [
        (([[1.0, 2.0]], torch.ones(2)), None),
        ((torch.ones(1, 2), [1.0, 1.0]), None),
        ((torch.ones(1, 2), None), [[1.0, 1.0]]),
    ],
    ids=["x", "weight", "residual"],
)
def test_rejects_lists(rms_norm_kernel, arguments, residual):
    with pytest.raises(
        TypeError, match=r"rms_norm: (x|weight|residual) must be a tensor; got list. Try torch.tensor\("
    ):
        rms_norm_kernel.rms_norm(*arguments, residual=residual)
