"""torch.compile, export, vmap, checkpointing and autocast on the CPU path, and that the bridge's Pallas path agrees."""

import subprocess
import sys
from pathlib import Path

import pytest
import ragged_dot as ragged_dot_package
import torch
from ragged_dot import grouped_mm, moe_experts, ragged_dot
from ragged_dot._bridge import use_path
from ragged_dot.op import _product
from torch.utils.checkpoint import checkpoint

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _layer(t, h=16, i=8, e=8, top_k=2, seed=0):
    torch.manual_seed(seed)
    weights = torch.randn(e, 2 * i, h) * h**-0.5, torch.randn(e, h, i) * i**-0.5
    scores, index = torch.rand(t, e).softmax(-1).topk(top_k)
    return torch.randn(t, h), *weights, index, scores


def _with_gradients(function, arguments):
    leaves = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in arguments]
    out = function(*leaves)
    out.square().sum().backward()
    return [out.detach(), *(a.grad for a in leaves if a.is_floating_point())]


def _assert_all_close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


# torch's own inductor uses torch.jit.script_method while it loads.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layer_is_one_graph_with_the_same_gradients(backend):
    arguments = _layer(32)
    compiled = torch.compile(moe_experts, fullgraph=True, backend=backend)
    _assert_all_close(_with_gradients(compiled, arguments), _with_gradients(moe_experts, arguments))


def test_the_first_call_of_a_process_may_be_compiled():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(ragged_dot_package.__file__).parents[1])!r}); "
        "import torch, ragged_dot; f = lambda x, w, s: ragged_dot.ragged_dot(x, w, s).sum(); "
        "x, w = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, 5, requires_grad=True); "
        "s = torch.tensor([2, 1]); "
        "torch.compile(f, fullgraph=True, backend='aot_eager')(x, w, s).backward(); "
        "print(x.grad[:, 0].tolist(), w.grad[:, 0, 0].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[5.0, 5.0, 5.0, 0.0] [2.0, 1.0]", done.stderr


def test_dynamic_shapes_compile_at_most_twice():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(moe_experts, fullgraph=True, dynamic=True, backend=count)
    for t in (1, 2, 7, 16, 33, 64, 100, 128):
        arguments = _layer(t)
        torch.testing.assert_close(compiled(*arguments), moe_experts(*arguments), **CLOSE)
    assert len(graphs) <= 2


def test_compiled_grouped_mm():
    x, w, offs = torch.randn(6, 7), torch.randn(3, 7, 5), torch.tensor([1, 3, 5], dtype=torch.int32)
    compiled = torch.compile(grouped_mm, fullgraph=True, backend="aot_eager")
    _assert_all_close(
        _with_gradients(lambda x, w: compiled(x, w, offs), (x, w)),
        _with_gradients(lambda x, w: grouped_mm(x, w, offs), (x, w)),
    )


class _Experts(torch.nn.Module):
    def forward(self, x, gate_up, down, index, scores):
        return moe_experts(x, gate_up, down, index, scores)


def test_export_with_any_number_of_tokens():
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = ({0: tokens}, None, None, {0: tokens}, {0: tokens})
    program = torch.export.export(_Experts(), _layer(6), dynamic_shapes=shapes)
    for t in (2, 45):
        arguments = _layer(t)
        torch.testing.assert_close(program.module()(*arguments), moe_experts(*arguments), **CLOSE)


def test_vmap_equals_a_loop():
    lhs, rhs = torch.randn(3, 6, 4), torch.randn(3, 2, 4, 5)
    sizes = torch.tensor([[2, 3], [0, 6], [0, 0]])
    got = torch.func.vmap(ragged_dot)(lhs, rhs, sizes)
    torch.testing.assert_close(got, torch.stack([ragged_dot(*one) for one in zip(lhs, rhs, sizes, strict=True)]))
    got = torch.func.vmap(ragged_dot, in_dims=(0, None, 0))(lhs, rhs[0], sizes)
    torch.testing.assert_close(got, torch.stack([ragged_dot(x, rhs[0], s) for x, s in zip(lhs, sizes, strict=True)]))


def test_vmap_of_a_gradient_equals_a_loop():
    lhs, rhs, sizes = torch.randn(3, 6, 4), torch.randn(2, 4, 5), torch.tensor([[2, 3], [0, 6], [0, 0]])
    gradient = torch.func.grad(lambda w, x, s: ragged_dot(x, w, s).square().sum())
    got = torch.func.vmap(gradient, in_dims=(None, 0, 0))(rhs, lhs, sizes)
    torch.testing.assert_close(got, torch.stack([gradient(rhs, x, s) for x, s in zip(lhs, sizes, strict=True)]))


def test_vmap_of_the_layer_equals_a_loop():
    x, gate_up, down, index, scores = _layer(12)
    split = [a.view(3, 4, -1) for a in (x, index, scores)]
    got = torch.func.vmap(moe_experts, in_dims=(0, None, None, 0, 0))(split[0], gate_up, down, *split[1:])
    torch.testing.assert_close(got.view(12, -1), moe_experts(x, gate_up, down, index, scores), **CLOSE)


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_nothing(autocast):
    arguments = _layer(32)

    def plain(*a):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return moe_experts(*a)

    def checkpointed(*a):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return checkpoint(moe_experts, *a, use_reentrant=False)

    _assert_all_close(_with_gradients(checkpointed, arguments), _with_gradients(plain, arguments))


def test_what_is_saved_does_not_depend_on_the_routing():
    def saved_shapes(seed):
        shapes = []

        def pack(tensor):
            shapes.append(tensor.shape)
            return tensor

        leaves = [a.requires_grad_() if a.is_floating_point() else a for a in _layer(32, seed=seed)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            moe_experts(*leaves)
        return shapes

    assert saved_shapes(1) == saved_shapes(2)


def test_autocast_computes_in_its_dtype_and_keeps_float32_gradients():
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(3, 8, 5, requires_grad=True)
    sizes = torch.tensor([2, 0, 3])
    with torch.autocast("cpu", torch.bfloat16):
        out = ragged_dot(x, w, sizes)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ragged_dot(x.bfloat16(), w.bfloat16(), sizes))
    out.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert not w.grad[1].any()


def test_autocast_leaves_float64_alone():
    x, w, sizes = torch.randn(4, 3).double(), torch.randn(2, 3, 5).double(), torch.tensor([2, 2])
    with torch.autocast("cpu", torch.bfloat16):
        assert ragged_dot(x, w, sizes).dtype == torch.float64


def test_the_interpreted_pallas_kernel_gives_the_same_layer_and_gradients():
    arguments = _layer(5)
    wanted = _with_gradients(moe_experts, arguments)
    with use_path("interpret"):
        _assert_all_close(_with_gradients(moe_experts, arguments), wanted)


def test_paths():
    assert _product.path_for(torch.ones(1)) == "torch"
    with use_path("interpret"):
        assert _product.path_for(torch.ones(1)) == "interpret"
