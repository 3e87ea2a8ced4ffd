"""torch.compile, vmap, export, checkpointing: what a model does with the function."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

EPS = 1e-6
ORDERS = ({}, {"float32_scale": True}, {"zero_centered": True})


def named(order):
    return next(iter(order), "llama")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
@pytest.mark.parametrize("order", ORDERS, ids=named)
def test_torch_compile_makes_one_graph(rms_norm_kernel, part, order, path):
    def f(x, weight, residual):
        y = rms_norm_kernel.rms_norm(x, weight, EPS, **order)
        z, total = rms_norm_kernel.rms_norm(y, weight, EPS, residual=residual, **order)
        return y.sum() + (z * total).sum()

    grads = []
    for run in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        leaves = [draw(5, 48, seed=1).requires_grad_(), draw(48, seed=2).requires_grad_(), draw(5, 48, seed=3)]
        with part("_bridge").use_path(path):
            value = run(*leaves)
            grads.append((value, *torch.autograd.grad(value, leaves[:2])))
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
def test_the_normalised_result_may_be_changed_in_place(rms_norm_kernel, part, path):
    x, weight, residual = (draw(*shape, seed=1).requires_grad_() for shape in ((5, 48), (48,), (5, 48)))

    def gradients(change):
        with part("_bridge").use_path(path):
            y, total = rms_norm_kernel.rms_norm(x, weight, EPS, residual=residual)
            return torch.autograd.grad(change(y).square().sum() + total.sum(), (x, weight, residual))

    torch.testing.assert_close(gradients(lambda y: y.mul_(2)), gradients(lambda y: y * 2))


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_dynamic_lengths_compile_at_most_twice(rms_norm_kernel, part, path):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    weight = draw(32, seed=1)
    with part("_bridge").use_path(path):
        f = torch.compile(
            lambda x: rms_norm_kernel.rms_norm(x, weight, EPS), dynamic=True, fullgraph=True, backend=counter
        )
        for m in (1, 2, 7, 16, 33, 64, 100, 128):
            x = draw(m, 32, seed=m)
            torch.testing.assert_close(f(x), rms_norm_kernel.rms_norm(x, weight, EPS))
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, in inductor
def test_inductor(rms_norm_kernel):
    weight, x = draw(48, seed=1), draw(5, 48)
    f = torch.compile(lambda x: rms_norm_kernel.rms_norm(x, weight, EPS, zero_centered=True), fullgraph=True)
    torch.testing.assert_close(f(x), rms_norm_kernel.rms_norm(x, weight, EPS, zero_centered=True))


def test_swapped_layer_compiles(rms_norm_kernel):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(draw(48)), EPS

        forward = rms_norm_kernel.layers.RMSNorm.forward

    layer, x = Layer(), draw(5, 48, seed=1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
@pytest.mark.parametrize("order", ORDERS, ids=named)
def test_vmap_matches_loop(rms_norm_kernel, part, order, path):
    x, weight = draw(3, 4, 40), draw(3, 40, seed=1)

    def f(x, weight):
        return rms_norm_kernel.rms_norm(x, weight, EPS, **order)

    with part("_bridge").use_path(path):
        batched = torch.func.vmap(f)(x, weight)
        torch.testing.assert_close(batched, torch.stack([f(a, b) for a, b in zip(x, weight, strict=True)]))
        shared = torch.func.vmap(f, in_dims=(1, None))(x, weight[0])
        torch.testing.assert_close(shared, torch.stack([f(a, weight[0]) for a in x.unbind(1)]))


def test_vmap_of_gradient_matches_loop(rms_norm_kernel):
    x, weight = draw(3, 4, 40), draw(40, seed=1)
    gradient = torch.func.grad(lambda x, w: rms_norm_kernel.rms_norm(x, w, EPS).square().sum(), argnums=(0, 1))
    batched = torch.func.vmap(gradient, in_dims=(0, None))(x, weight)
    loop = [gradient(row, weight) for row in x]
    for i in range(2):
        torch.testing.assert_close(batched[i], torch.stack([g[i] for g in loop]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["auto", "torch"])
def test_export_with_a_dynamic_length(rms_norm_kernel, part, path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(draw(40))

        def forward(self, x):
            return rms_norm_kernel.rms_norm(x, self.weight, EPS)

    model, rows = Model(), torch.export.Dim("rows", min=2, max=1024)
    with part("_bridge").use_path(path):
        program = torch.export.export(model, (draw(4, 40),), dynamic_shapes=({0: rows},))
        x = draw(9, 40, seed=5)
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
def test_checkpoint_recomputes_the_same(rms_norm_kernel, part, path):
    weight = draw(40, seed=1).requires_grad_()

    def block(x):
        return torch.tanh(rms_norm_kernel.rms_norm(x, weight, EPS, residual=x)[0])

    results = []
    with part("_bridge").use_path(path):
        for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
            x = draw(6, 40).requires_grad_()
            loss = run(x).sum()
            results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def test_autocast(rms_norm_kernel):
    """Statistics stay in float32 and the dtype stays that of x."""
    x, weight = draw(4, 40).bfloat16(), draw(40, seed=1).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = rms_norm_kernel.rms_norm(x, weight, EPS)
    torch.testing.assert_close(y, rms_norm_kernel.rms_norm(x, weight, EPS), rtol=0, atol=0)
