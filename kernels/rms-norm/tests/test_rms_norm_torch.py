"""The public function on CPU tensors, and its ops under torch's own checks."""

from __future__ import annotations

import copy
from types import MethodType

import numpy as np
import pytest
import torch

EPS = 1e-6
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
ORDERS = ({}, {"float32_scale": True}, {"zero_centered": True})


def named(order):
    return next(iter(order), "llama")


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layers(dtype=torch.float32, weight_dtype=None):
    """(layer of a model, name of the layer that replaces it)"""
    gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    n = 96
    pairs = [
        (llama.LlamaRMSNorm(n, EPS), "RMSNorm"),
        (qwen.Qwen3MoeRMSNorm(n, EPS), "RMSNorm"),
        (gemma3.Gemma3RMSNorm(n, EPS), "RMSNormZeroCentered"),
        (gemma4.Gemma4RMSNorm(n, EPS), "RMSNormFloat32Scale"),
        (torch.nn.RMSNorm(n, eps=EPS), "RMSNormFloat32Scale"),
    ]
    for seed, (layer, _) in enumerate(pairs):
        layer.weight.data.copy_(draw(n, seed=seed))
        layer.to(weight_dtype or dtype)
    return pairs


def swapped(layer, cls):
    """What kernels.kernelize does to an instance."""
    new = copy.deepcopy(layer)
    new.forward = MethodType(cls.forward, new)
    return new


def assert_within_one_ulp(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    a, b = actual.detach().float().numpy(), expected.detach().float().numpy()
    ulp = torch.finfo(expected.dtype).eps * np.maximum(np.abs(b), 1e-6)
    assert (np.abs(a - b) <= ulp).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 96), (2, 3, 96), (2, 1, 3, 96), (96,), (0, 96)], ids=str)
def test_swapped_layer_gives_what_the_layer_gave(rms_norm_kernel, dtype, shape):
    x = draw(*shape, dtype=dtype, seed=9)
    for layer, name in layers(dtype):
        new = swapped(layer, getattr(rms_norm_kernel.layers, name))
        if name == "RMSNormZeroCentered" and dtype in HALVES:
            assert_within_one_ulp(new(x), layer(x))  # unit + unit * weight: equal but for a last bit of float32
        else:
            torch.testing.assert_close(new(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtype_follows_the_replaced_layer(rms_norm_kernel, weight_dtype):
    """Llama with a float32 weight gives float32; Gemma gives x.dtype."""
    x = draw(4, 96, dtype=torch.bfloat16)
    for layer, name in layers(torch.bfloat16, weight_dtype):
        if isinstance(layer, torch.nn.RMSNorm) and weight_dtype is torch.float32:
            continue  # torch.nn.RMSNorm itself refuses or widens a mixed pair, depending on its version
        assert_within_one_ulp(swapped(layer, getattr(rms_norm_kernel.layers, name))(x), layer(x))


def test_layer_gradients_equal_the_replaced_layer(rms_norm_kernel):
    x, dy = draw(5, 96, seed=1), draw(5, 96, seed=2)
    for layer, name in layers():
        grads = []
        for module in (layer, swapped(layer, getattr(rms_norm_kernel.layers, name))):
            leaf = x.clone().requires_grad_()
            grads.append(torch.autograd.grad(module(leaf), (leaf, module.weight), dy))
        for new, old in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)


def test_layers_without_weight_or_epsilon(rms_norm_kernel):
    x = draw(3, 96)
    plain = torch.nn.RMSNorm(96, elementwise_affine=False)
    new = swapped(plain, rms_norm_kernel.layers.RMSNormFloat32Scale)
    torch.testing.assert_close(new(x), plain(x), rtol=0, atol=0)
    gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4").Gemma4RMSNorm(96, with_scale=False)
    new = swapped(gemma4, rms_norm_kernel.layers.RMSNormFloat32Scale)
    torch.testing.assert_close(new(x), gemma4(x), rtol=0, atol=0)


def test_layers_pass_the_validator_of_the_kernels_library(rms_norm_kernel):
    validate = pytest.importorskip("kernels.layer.layer")._validate_layer
    for layer, name in layers():
        if not isinstance(layer, torch.nn.RMSNorm):
            cls = getattr(rms_norm_kernel.layers, name)
            validate(check_cls=type(layer), cls=cls, repo="pallas-hub/rms-norm")
            assert (cls.can_torch_compile, cls.has_backward) == (True, True)


def test_float16_range_and_epsilon(rms_norm_kernel, part):
    """Squares of 400 overflow float16; an epsilon of 1e-6 is no float16; a row of zeros has a gradient."""
    rms_norm = rms_norm_kernel.rms_norm
    one = torch.ones(1024, dtype=torch.float16)
    assert rms_norm(400 * one, one, EPS).eq(1.0).all()
    assert (rms_norm(1e-4 * one, one, EPS).float() - 0.0995).abs().max() < 1e-3
    spike = torch.zeros(1024, dtype=torch.float16)
    spike[3] = 1000
    assert rms_norm(spike, one, EPS)[3].item() == 32.0
    for path in ("torch", "interpret"):
        with part("_bridge").use_path(path):
            zeros = torch.zeros(2, 64, requires_grad=True)
            weight = draw(64, seed=3)
            y = rms_norm(zeros, weight, EPS)
            y.sum().backward()
        assert y.eq(0).all()
        torch.testing.assert_close(zeros.grad, (weight / EPS**0.5).expand(2, 64))


def test_backward_leaves_its_input_alone(rms_norm_kernel, part):
    """y = n2(f(n1(x))) + n1(x): the gradient that reaches n1 is used twice."""
    rms_norm = rms_norm_kernel.rms_norm
    grads = {}
    for path in ("auto", "torch", "interpret"):
        x = draw(6, 512, dtype=torch.bfloat16).requires_grad_()
        weight = draw(512, seed=1).to(torch.bfloat16)
        upstream = draw(6, 512, dtype=torch.bfloat16, seed=2)
        kept = upstream.clone()
        with part("_bridge").use_path(path):
            inner = rms_norm(x, weight, EPS)
            y = rms_norm(torch.tanh(inner), weight, EPS) + inner
            (grads[path],) = torch.autograd.grad(y, x, upstream)
        assert torch.equal(upstream, kept)
    exact = draw(6, 512, dtype=torch.bfloat16).float().requires_grad_()
    w = weight.float()
    inner = torch.rms_norm(exact, (512,), w, EPS)
    (torch.rms_norm(torch.tanh(inner), (512,), w, EPS) + inner).backward(upstream.float())
    for grad in grads.values():
        # bfloat16 activations: four roundings of half an ulp before the gradient is rounded.
        assert (grad.float() - exact.grad).abs().max() <= 4 * 2**-8 * exact.grad.abs().max()


@pytest.mark.parametrize("order", ORDERS, ids=named)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paths_agree_and_are_recorded(rms_norm_kernel, part, dtype, order):
    bridge = part("_bridge")
    x, weight, residual = draw(5, 70, dtype=dtype), draw(70, dtype=dtype, seed=1), draw(5, 70, dtype=dtype, seed=2)
    results = {}
    for path in ("auto", "torch", "interpret"):
        leaves = [t.clone().requires_grad_() for t in (x, weight, residual)]
        with bridge.use_path(path), bridge.record_paths() as ran:
            y = rms_norm_kernel.rms_norm(leaves[0], leaves[1], EPS, **order)
            z, total = rms_norm_kernel.rms_norm(leaves[0], leaves[1], EPS, residual=leaves[2], **order)
            grads = torch.autograd.grad((y * y.detach()).sum() + (z * total).sum(), leaves)
        results[path] = (y, z, total, *grads)
        took = "interpret" if path == "interpret" else "torch"
        assert {name.split("::")[1] for name, _ in ran} == {
            "rms_norm", "rms_norm_residual", "rms_norm_backward", "rms_norm_residual_backward"
        }  # fmt: skip
        assert {way for _, way in ran} == {took}
    for path in ("torch", "interpret"):
        for got, expected in zip(results[path], results["auto"], strict=True):
            assert got.dtype == expected.dtype
            error = (got.float() - expected.float()).abs().max()
            assert error <= 4 * torch.finfo(dtype).eps * expected.float().abs().max()


@pytest.mark.parametrize("order", ORDERS, ids=named)
def test_gradcheck_of_the_written_backward(part, order):
    """The gradient rules of the ops against numerical differences, in float64 (below the dtype check)."""
    op = part("op")
    x, weight, dy = (draw(*s, seed=i).double() for i, s in enumerate(((3, 7), (7,), (3, 7))))

    def forward(x, weight):
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return unit * (weight + 1.0 if order.get("zero_centered") else weight)

    expected = torch.autograd.functional.vjp(forward, (x, weight), dy)[1]
    flags = (bool(order.get("zero_centered")), bool(order))
    for got, want in zip(op._backward_torch(x, weight, dy, EPS, *flags), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(part, dtype, grad):
    op = part("op")
    weight = draw(16, dtype=dtype, seed=1).requires_grad_(grad)
    for x in (draw(6, 16), draw(16, 6).t(), draw(2, 3, 16), draw(0, 16)):
        x = x.to(dtype).detach().requires_grad_(grad)
        torch.library.opcheck(op.rms_norm_op.overload, (x, weight, EPS, False, False))
        residual = torch.ones_like(x).requires_grad_(grad)
        torch.library.opcheck(op.rms_norm_residual_op.overload, (x, residual, weight, EPS, True, True))


def test_strided_input(rms_norm_kernel, part):
    weight = draw(6, seed=1)
    for x in (draw(6, 16).t(), draw(4, 12)[:, ::2], draw(1, 6).expand(5, 6)):
        expected = rms_norm_kernel.rms_norm(x.contiguous(), weight, EPS)
        torch.testing.assert_close(rms_norm_kernel.rms_norm(x, weight, EPS), expected)
        with part("_bridge").use_path("interpret"):
            torch.testing.assert_close(rms_norm_kernel.rms_norm(x, weight, EPS), expected)


def test_weight_none_and_epsilon_none(rms_norm_kernel, part):
    x = draw(3, 40)
    expected = torch.rms_norm(x, (40,), None, None)
    for path in ("auto", "torch", "interpret"):
        with part("_bridge").use_path(path):
            torch.testing.assert_close(rms_norm_kernel.rms_norm(x, None, None), expected)


@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_epsilon_none_is_that_of_torch_on_a_cpu(rms_norm_kernel, dtype, path):
    n = 96
    x = draw(3, n, dtype=torch.float32).mul(1e-4).to(dtype)  # so small that epsilon decides
    layer = torch.nn.RMSNorm(n, dtype=dtype)  # eps=None
    with rms_norm_kernel._bridge.use_path(path):
        y = rms_norm_kernel.rms_norm(x, layer.weight.detach(), None, float32_scale=True)
    # Two roundings on the way, float32 sums in another order; a wrong epsilon would change every digit.
    torch.testing.assert_close(y, layer(x).detach(), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_float32_scale_layer_reads_epsilon_by_either_name(rms_norm_kernel):
    x = draw(2, 96)
    layer = torch.nn.RMSNorm(96, eps=0.5)
    expected = layer(x)
    layer.variance_epsilon = layer.eps
    del layer.eps
    torch.testing.assert_close(swapped(layer, rms_norm_kernel.layers.RMSNormFloat32Scale)(x), expected)
