"""Ops of the bridge under torch's transforms: opcheck, compile, export, vmap, functorch, checkpoint, autocast."""

import jax
import pytest
import torch
from bridge_ops import (
    NAMESPACE,
    awkward_inputs,
    flat_sum,
    gelu,
    linear,
    linear_torch,
    matmul,
    scale,
    split,
)
from torch.utils.checkpoint import checkpoint

from pallas_hub.torch_bridge import Lazy, jax_op, record_paths, use_path

# torch's compiler and torch.func.jvp import modules of torch that use what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")

INPUTS = awkward_inputs()


def torch_gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def count_compilations(f, **options):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(f, backend=backend, fullgraph=True, **options), graphs


# opcheck


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("path", ["auto", "interpret"])
def test_opcheck(x, path):
    with use_path(path):
        torch.library.opcheck(scale.overload, (x, 3.0))
        torch.library.opcheck(gelu.overload, (x,))
        w = torch.randn(4, 3, requires_grad=x.requires_grad).to(x.dtype).detach()
        torch.library.opcheck(linear.overload, (x, w, None, 0.5))
        torch.library.opcheck(linear.overload, (x, w.requires_grad_(x.requires_grad), w[0].detach(), 0.5))
        torch.library.opcheck(matmul.overload, (x, w))
        if not x.requires_grad:
            torch.library.opcheck(split.overload, (x,))


# Gradients


def test_gradients_of_a_jax_rule():
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((5, 4), (4, 3), (3,)))
    grad = torch.randn(5, 3)
    ours = torch.autograd.grad(linear(x, w, b, 0.5), (x, w, b), grad)
    right = torch.autograd.grad(linear_torch(x, w, b, 0.5), (x, w, b), grad)
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("asked", ["x", "w", "b", "xw"])
def test_a_gradient_goes_only_to_those_that_ask(asked):
    tensors = {"x": torch.randn(5, 4), "w": torch.randn(4, 3), "b": torch.randn(3)}
    for name in asked:
        tensors[name].requires_grad_()
    linear(*tensors.values(), 1.0).sum().backward()
    assert {name for name, t in tensors.items() if t.grad is not None} == set(asked)


def test_nothing_is_computed_for_a_side_that_does_not_ask():
    """The rule of the weights alone has no large matrix product left in the compiled program."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    op = jax_op("half_asked", namespace=NAMESPACE, fn=product, vjp=lambda x, w, g: jax.vjp(product, x, w)[1](g))

    def products_compiled(asked):
        jitted = op.backward_op._cpu._jitted[(asked,), None]
        program = jitted.lower(x.detach().numpy(), w.detach().numpy(), torch.ones(64, 16).numpy())
        return program.compile().as_text().count(" dot(")

    x, w = torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)
    op(x, w).sum().backward()
    op(x.requires_grad_(), w).sum().backward()
    assert (products_compiled(0b10), products_compiled(0b11)) == (1, 2)


def test_needs_tells_a_torch_rule_what_to_compute():
    x, w = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True)
    with record_paths() as ran:
        matmul(x, w).sum().backward()
    assert len(ran) == 2
    torch.testing.assert_close(w.grad, x.t() @ torch.ones(5, 3))


def test_only_what_is_needed_is_saved():
    x, w = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        matmul(x, w)
    assert [t.shape for t in saved] == [x.shape]


def test_a_gradient_has_the_dtype_of_its_tensor():
    x = torch.randn(5, 4, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
    linear(x, w).sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.bfloat16)
    assert w.grad.shape == w.shape


def test_second_order_through_torch_rules_is_right_and_through_jax_rules_refused():
    x = torch.randn(5, 4, requires_grad=True)
    w = torch.randn(4, 3, requires_grad=True)

    def penalty(product):
        (g,) = torch.autograd.grad(product(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (x, w))

    torch.testing.assert_close(penalty(matmul), penalty(torch.matmul))
    with pytest.raises(NotImplementedError, match=r"linear_backward: has no gradient.*a gradient of a gradient"):
        penalty(linear)


def test_an_op_without_a_rule_fails_only_when_its_gradient_is_asked_for():
    y = flat_sum(torch.randn(3, requires_grad=True), torch.randn(3))
    with pytest.raises(NotImplementedError, match="flat_sum: has no gradient"):
        y.sum().backward()


def test_integer_outputs_carry_no_gradient():
    y, index = split(torch.randn(3, 4, requires_grad=True))
    assert (y.requires_grad, index.requires_grad) == (True, False)


def test_a_jax_rule_may_be_a_lazy_pallas_kernel():
    op = jax_op(
        "scale_both_ways",
        namespace=NAMESPACE,
        fn=Lazy("bridge_ops:_scale_pallas"),
        signature=_scale_signature,
        vjp=Lazy("bridge_ops:scale_pallas_vjp"),
    )
    x = torch.randn(11, 4, requires_grad=True)
    with record_paths() as ran, use_path("interpret"):
        op(x, 3.0).sum().backward()
    assert ran == [(op.qualname, "interpret"), (op.qualname + "_backward", "interpret")]
    assert x.grad.eq(3).all()
    with pytest.raises(RuntimeError, match=r'scale_both_ways: path "jax" can.t compile a Pallas kernel'):
        op(x, 3.0)


def _scale_signature(x: torch.Tensor, factor: float) -> torch.Tensor: ...


def test_complex_gradients_follow_torchs_convention():
    """torch's gradient is the conjugate of JAX's."""

    def f(x: jax.Array) -> jax.Array:
        return x * x * (2 + 1j)

    op = jax_op("complex_square", namespace=NAMESPACE, fn=f, vjp=lambda x, g: jax.vjp(f, x)[1](g))
    x, grad = torch.randn(2, 3, dtype=torch.complex64)
    x.requires_grad_()
    ours = torch.autograd.grad(op(x), x, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(x * x * (2 + 1j), x, grad))


def test_a_jax_rule_gets_float0_for_an_integer_output():
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * 2, jax.numpy.argmax(x).astype(jax.numpy.int32)

    op = jax_op("with_argmax", namespace=NAMESPACE, fn=f, vjp=lambda x, *grads: jax.vjp(f, x)[1](grads))
    x = torch.randn(3, requires_grad=True)
    op(x)[0].sum().backward()
    assert x.grad.eq(2).all()


def test_mistakes_in_a_rule_are_named():
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    with pytest.raises(
        ValueError, match=r"double: save must list .* of \['x', 'outputs', 'outputs\[0\]'\]; got \['y'\]"
    ):
        jax_op("double", namespace=NAMESPACE, fn=double).set_backward(lambda *a: None, save=["y"])
    with pytest.raises(
        ValueError, match=r"double_0: save must list .* of \['x', 'outputs', 'outputs\[0\]'\]; got 'outputs'"
    ):
        jax_op("double_0", namespace=NAMESPACE, fn=double).set_backward(lambda *a: None, save="outputs")

    op = jax_op("double_1", namespace=NAMESPACE, fn=double)
    op.set_backward(lambda saved, needs, grad: saved.x * grad, save=[])
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(AttributeError, match="double_1: x was not saved for the backward; name it in set_backward"):
        op(x).sum().backward()

    op = jax_op("double_2", namespace=NAMESPACE, fn=double)
    op.set_backward(lambda saved, needs, grad: (grad, grad))
    with pytest.raises(TypeError, match="double_2: the backward must return one entry for each of x; got 2"):
        op(x).sum().backward()

    op = jax_op("double_3", namespace=NAMESPACE, fn=double, vjp=lambda x, grad: grad[:1])
    with pytest.raises(
        ValueError, match=r"double_3_backward: entry 0 of vjp must have the shape .* \(3,\); got \(1,\)"
    ):
        op(x).sum().backward()


def test_a_rule_may_use_outputs():
    def exp(x: jax.Array) -> jax.Array:
        return jax.numpy.exp(x)

    op = jax_op("exp", namespace=NAMESPACE, fn=exp)
    op.set_backward(lambda saved, needs, grad: grad * saved.outputs[0], save=["outputs"])
    x = torch.randn(3, requires_grad=True)
    op(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_a_rule_keeps_one_output_and_the_others_stay_free():
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * 2, jax.numpy.exp(x)

    op = jax_op("both", namespace=NAMESPACE, fn=both)
    op.set_backward(lambda saved, needs, *grads: grads[0] * 2 + grads[1] * saved.outputs[1], save=["outputs[1]"])
    x = torch.randn(3, requires_grad=True)
    double, exp = op(x)
    double.mul_(3)
    (double + exp).sum().backward()
    torch.testing.assert_close(x.grad, 6 + x.detach().exp())
    double, exp = op(x)
    exp.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        exp.sum().backward()


def test_forward_mode_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="gelu: has no forward-mode derivative"):
        torch.func.jvp(gelu, (torch.randn(3),), (torch.randn(3),))


# torch.compile and torch.export


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("path", ["auto", "interpret"])
def test_compiled_equals_eager_with_gradients(dynamic, path):
    def f(x, w):
        return linear(scale(gelu(x), 3.0), w).sum()

    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    with use_path(path):
        right = torch.autograd.grad(f(x, w), (x, w))
        ours = torch.autograd.grad(torch.compile(f, fullgraph=True, dynamic=dynamic)(x, w), (x, w))
    torch.testing.assert_close(ours, right)


LENGTHS = (1, 2, 7, 16, 33, 64, 100, 128)


def test_many_lengths_compile_at_most_twice():
    f, graphs = count_compilations(lambda x, w: split(linear(x, w))[0] * 2, dynamic=True)
    w = torch.nn.Parameter(torch.randn(4, 3))
    for n in LENGTHS:
        x = torch.randn(n, 4)
        y = linear_torch(x, w)
        torch.testing.assert_close(f(x, w), torch.cat([y, y, torch.ones(1, 3)]) * 2)
    assert len(graphs) <= 2


def test_many_lengths_compile_at_most_twice_with_gradients():
    torch._dynamo.utils.counters.clear()
    f = torch.compile(lambda x, w: linear(x, w).sum(), fullgraph=True, dynamic=True, backend="aot_eager")
    w = torch.nn.Parameter(torch.randn(4, 3))
    for n in LENGTHS:
        f(torch.randn(n, 4, requires_grad=True), w).backward()
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compilations <= 2


def test_jax_traces_once_per_length():
    def cube(x: jax.Array) -> jax.Array:
        return x**3

    op = jax_op("cube", namespace=NAMESPACE, fn=cube)
    f = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
    for _ in range(2):
        for n in LENGTHS:
            f(torch.randn(n))
    assert op.traces == len(LENGTHS)


def test_sizes_that_must_be_equal_become_a_guard():
    """x (n,) and y (a, b) with a * b = n: JAX can't tell for all sizes, so torch learns what holds."""
    f, graphs = count_compilations(lambda x, y: flat_sum(x, y), dynamic=True)
    for n in (6, 8, 10):
        x, y = torch.randn(n), torch.randn(n, 1)
        assert torch.equal(f(x, y), x + y[:, 0])
    assert len(graphs) <= 2


@pytest.mark.parametrize("zero_allowed", [False, True])
def test_a_fake_call_learns_only_the_equalities_that_it_needs(zero_allowed):
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    def symbolic(name, *shape):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
        return mode.from_tensor(torch.randn(shape), symbolic_context=context, source=ConstantSource(name))

    env = ShapeEnv(duck_shape=False, specialize_zero_one=not zero_allowed)
    mode = torch._subclasses.FakeTensorMode(shape_env=env)
    x, w = symbolic("x", 4, 4), symbolic("w", 4, 3)
    with mode:
        before = [str(size) for size in (*x.shape, *w.shape)]
        y = linear(x, w)
    assert [str(size) for size in y.shape] == [before[0], before[3]]
    (guard,) = (str(guard.expr) for guard in env.guards if "Eq" in str(guard.expr))
    assert guard in (f"Eq({before[1]}, {before[2]})", f"Eq({before[2]}, {before[1]})")
    assert [size.node.hint for size in y.shape] == [4, 3]


def test_sizes_of_data_that_would_have_to_be_equal_are_refused():
    def f(x, y):
        return flat_sum(x[x > 0], y[y > 0])

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        with pytest.raises(Exception, match="flat_sum: the output shape can't be worked out for sizes that depend on"):
            torch.compile(f, fullgraph=True, backend="aot_eager")(torch.ones(3), torch.ones(3))
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False


def test_a_mistake_in_shapes_shows_numbers_also_when_compiled():
    f = torch.compile(lambda x, w: linear(x, w), fullgraph=True, dynamic=True)
    with pytest.raises(Exception, match=r"contracting dimensions.* got \(7,\) and \(4,\)"):
        f(torch.randn(5, 7), torch.randn(4, 3))


def test_sizes_that_do_not_trace_fall_back_to_one_compilation_each_and_say_so(caplog):
    def stubborn(x: jax.Array) -> jax.Array:
        return x * int(x.shape[0])  # needs a number

    op = jax_op("stubborn", namespace=NAMESPACE, fn=stubborn)
    f, graphs = count_compilations(op, dynamic=True)
    for n in (3, 4, 5):
        assert torch.equal(f(torch.ones(n)), torch.full((n,), float(n)))
    assert len(graphs) == 3
    assert "stubborn: the JAX function does not trace with symbolic sizes" in caplog.text
    assert "give jax_op a shape_fn" in caplog.text


def test_expressions_of_sizes_go_in_and_come_out():
    def f(x):
        return split(torch.cat([x, x, x[:1]]))[0].sum(1) * 2

    compiled, graphs = count_compilations(f, dynamic=True)
    for n in (2, 3, 9, 50):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), f(x))
    assert len(graphs) == 1


def test_sizes_that_depend_on_data():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x):
        return split(x[x[:, 0] > 0])[0]

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        for x in (torch.randn(9, 4), -torch.ones(3, 4), torch.ones(3, 4)):
            rows = x[x[:, 0] > 0]
            assert torch.equal(f(x), torch.cat([rows, rows, torch.ones(1, 4)]))
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_size(strict):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return split(linear(gelu(x), self.w))[0]

    model = Model()
    n = torch.export.Dim("n", min=1, max=1000)
    exported = torch.export.export(model, (torch.randn(5, 4),), dynamic_shapes={"x": {0: n}}, strict=strict)
    targets = {str(node.target) for node in exported.graph.nodes}
    assert f"{NAMESPACE}.linear.default" in targets
    x = torch.randn(11, 4)
    torch.testing.assert_close(exported.module()(x), model(x))


def test_float64_has_a_shape_on_a_torch_path_and_none_elsewhere():
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.library.opcheck(scale.overload, (x, 2.0))
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(TypeError, match="gelu: x is float64"):
        gelu(mode.from_tensor(x))
    assert not jax.config.jax_enable_x64


# vmap and functorch


@pytest.mark.parametrize("in_dims", [(0, None), (1, 0), (None, 2), (-1, 0)], ids=str)
def test_vmap_equals_a_loop(in_dims):
    def with_batch(shape, dim):
        shape = list(shape)
        if dim is not None:
            shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, 3)
        return torch.randn(shape)

    x, w = with_batch((5, 4), in_dims[0]), with_batch((4, 2), in_dims[1])
    expected = torch.stack(
        [linear(*(t if d is None else t.select(d, i) for t, d in zip((x, w), in_dims, strict=True))) for i in range(3)]
    )
    torch.testing.assert_close(torch.vmap(linear, in_dims)(x, w), expected)


def test_vmap_of_several_outputs_and_out_dims():
    x = torch.randn(3, 5, 4)
    y, index = torch.vmap(split, out_dims=(1, 0))(x)
    assert torch.equal(y, torch.stack([split(e)[0] for e in x], 1))
    assert torch.equal(index, torch.stack([split(e)[1] for e in x]))


def test_vmap_over_nothing():
    y, index = torch.vmap(split)(torch.randn(0, 5, 4))
    assert (y.shape, index.shape, index.dtype) == ((0, 11, 4), (0, 5), torch.int32)


def test_a_rule_of_its_own_replaces_the_loop():
    op = jax_op("sin", namespace=NAMESPACE, fn=lambda x: jax.numpy.sin(x), signature=_unary)
    op.set_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
    x = torch.randn(3, 4)
    with record_paths() as ran:
        torch.testing.assert_close(torch.vmap(op, 1, 1)(x), x.sin())
    assert len(ran) == 1


def _unary(x: torch.Tensor) -> torch.Tensor: ...


FUNCTIONS = {
    "grad": lambda op: torch.func.grad(lambda x: op(x).sum()),
    "vmap-of-grad": lambda op: torch.vmap(torch.func.grad(lambda x: op(x).sum())),
    "grad-of-vmap": lambda op: torch.func.grad(lambda x: torch.vmap(op)(x).square().sum()),
    "vjp": lambda op: lambda x: torch.func.vjp(op, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda op: torch.func.jacrev(op),
    "vmap-of-vmap": lambda op: torch.vmap(torch.vmap(op)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functorch(name):
    x = torch.randn(3, 4)
    torch.testing.assert_close(FUNCTIONS[name](gelu)(x), FUNCTIONS[name](torch_gelu)(x))


def test_functorch_grad_of_grad_through_torch_rules():
    def f(op):
        return torch.func.grad(lambda w: torch.func.grad(lambda w: op(x, w).pow(3).sum())(w).sum())

    x, w = torch.randn(3, 4), torch.randn(4, 2)
    torch.testing.assert_close(f(matmul)(w), f(torch.matmul)(w))


def test_functorch_compiled():
    x = torch.randn(3, 4)
    f = FUNCTIONS["vmap-of-grad"]
    torch.testing.assert_close(torch.compile(f(gelu), fullgraph=True, backend="aot_eager")(x), f(torch_gelu)(x))


# checkpoint, autocast


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoint_changes_nothing(autocast):
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)

    def block(x, w):
        return linear(gelu(x), w).square().sum()

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        right = torch.autograd.grad(block(x, w), (x, w))
        ours = torch.autograd.grad(checkpoint(block, x, w, use_reentrant=False), (x, w))
    torch.testing.assert_close(ours, right, rtol=0, atol=0)


def test_autocast_leaves_an_op_alone():
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    right = matmul(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        ours = matmul(x, w)
        grads = torch.autograd.grad(ours.sum(), (x, w))
        assert torch.equal(matmul(x.detach(), w.detach()), right)
    assert torch.equal(ours, right)
    torch.testing.assert_close(grads, torch.autograd.grad(right.sum(), (x, w)))
