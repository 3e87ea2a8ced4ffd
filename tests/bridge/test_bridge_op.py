"""Declaring ops, choosing paths, and the words of every refusal."""

from __future__ import annotations

import copy
import math
import sys
import types

import jax
import jax.numpy as jnp
import pytest
import torch
from bridge_ops import NAMESPACE, gelu, linear, linear_torch, scale, split
from torch import Tensor

from pallas_hub.torch_bridge import Lazy, jax_op, record_paths, use_path
from pallas_hub.torch_bridge.schema import schema_of


def test_the_example_of_the_docstring_runs_and_prints_what_it_says(capsys):
    import pallas_hub.torch_bridge as bridge

    lines = bridge.__doc__.splitlines()
    code = [line.removeprefix("    ") for line in lines if line.startswith("    ")]
    assert 8 <= len([line for line in code if line]) <= 14
    (promised,) = (line.partition("# ")[2] for line in code if line.startswith("print("))
    module = types.ModuleType("bridge_example")
    exec("\n".join(code), module.__dict__)
    assert capsys.readouterr().out.strip() == promised


@pytest.mark.parametrize("bias", [None, torch.randn(3)], ids=["no-bias", "bias"])
def test_optional_tensors_and_attributes(bias):
    x, w = torch.randn(5, 4), torch.randn(4, 3)
    torch.testing.assert_close(linear(x, w, bias), linear_torch(x, w, bias))
    torch.testing.assert_close(linear(x, w, bias, 0.5), linear_torch(x, w, bias, 0.5))
    torch.testing.assert_close(linear(x, w, bias=bias, scale=2), linear_torch(x, w, bias, 2.0))


def test_several_outputs_come_as_a_tuple():
    x = torch.randn(3, 4)
    y, index = split(x)
    assert y.shape == (7, 4)
    assert torch.equal(index.long(), x.argmax(1))


def test_a_direct_call_equals_a_call_through_the_dispatcher():
    x, w = torch.randn(5, 4), torch.randn(4, 3)
    assert torch.equal(linear(x, w, None, 0.5), linear.overload(x, w, None, 0.5))


def test_the_profiler_sees_every_call():
    x = torch.randn(3)
    gelu(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gelu(x)
    assert gelu.qualname in {event.key for event in profile.key_averages()}


def test_a_dispatch_mode_sees_every_call():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3)
    with Watch():
        gelu(x)
    assert seen == [f"{NAMESPACE}.gelu.default"]


def test_wrong_argument_types_get_torchs_own_message():
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor' for argument 'x'"):
        gelu([1.0, 2.0])
    with pytest.raises(RuntimeError, match="missing value for argument 'w'"):
        linear(torch.randn(2, 2))


def test_deepcopy_of_a_holder_keeps_the_op():
    holder = torch.nn.Module()
    holder.op = gelu
    assert copy.deepcopy(holder).op is gelu


# Schema


@pytest.mark.parametrize(
    ("annotations", "text"),
    [
        ({"x": "Tensor", "return": "Tensor"}, "(Tensor x) -> Tensor"),
        ({"x": torch.Tensor, "return": torch.Tensor}, "(Tensor x) -> Tensor"),
        ({"x": jax.Array, "b": jax.Array | None, "return": jax.Array}, "(Tensor x, Tensor? b) -> Tensor"),
        ({"x": "jax.Array", "b": "Optional[Tensor]", "return": "Array"}, "(Tensor x, Tensor? b) -> Tensor"),
        (
            {"x": Tensor, "f": float, "i": "int", "o": "int | None", "s": str, "t": tuple[int, ...], "return": Tensor},
            "(Tensor x, float f, int i, int? o, str s, int[] t) -> Tensor",
        ),
        ({"x": Tensor, "return": tuple[Tensor, Tensor]}, "(Tensor x) -> (Tensor, Tensor)"),
        ({"x": Tensor, "return": "tuple[Tensor, jax.Array]"}, "(Tensor x) -> (Tensor, Tensor)"),
    ],
    ids=range(7),
)
def test_schema_follows_the_annotations(annotations, text):
    names = ", ".join(name for name in annotations if name != "return")
    function = eval(f"lambda {names}: None")
    function.__annotations__ = annotations
    assert str(schema_of(function, "op")) == text


def test_defaults_of_every_kind_survive():
    def f(
        x: jax.Array,
        b: jax.Array | None = None,
        f: float = 1e-6,
        flag: bool = True,
        text: str = 'a"b\\',
        n: int | None = None,
        sizes: tuple[int, ...] = (1, 2),
    ) -> jax.Array:
        assert (b, flag, text, n, sizes) == (None, True, 'a"b\\', None, (1, 2))
        return x + f

    op = jax_op("defaults", namespace=NAMESPACE, fn=f)
    assert op.overload(torch.zeros(1, dtype=torch.float32)).item() == pytest.approx(1e-6)


def test_declaration_mistakes_are_named():
    def no_annotation(x, y: Tensor) -> Tensor: ...
    def odd_annotation(x: Tensor, y: dict) -> Tensor: ...
    def mixed(x: Tensor, n: int, y: Tensor) -> Tensor: ...
    def no_tensor(n: int) -> Tensor: ...
    def no_return(x: Tensor): ...
    def any_number(x: Tensor) -> tuple[Tensor, ...]: ...

    for function, message in [
        (no_annotation, r"op: parameter x must be annotated as Tensor or jax.Array.*; got no annotation"),
        (odd_annotation, r"op: parameter y must be annotated .*; got dict"),
        (mixed, r"op: tensors must come before attributes; got \(x, n, y\)"),
        (no_tensor, r"op: the first parameter must be a tensor"),
        (no_return, r"op: the return annotation must be Tensor, or for several outputs a tuple .*; got nothing"),
        (any_number, r"op: the return annotation must be .*; got tuple\[Tensor, ...\]"),
    ]:
        with pytest.raises(TypeError, match=message):
            jax_op("op", namespace=NAMESPACE, fn=function)
    with pytest.raises(TypeError, match="op: fn is Lazy, so the schema must come from torch_fn or signature"):
        jax_op("op", namespace=NAMESPACE, fn=Lazy("a:b"))
    with pytest.raises(ValueError, match=r'Lazy: target must be "module:function"; got "kernel"'):
        Lazy("kernel")


def test_a_function_that_returns_something_else_than_it_says_is_refused():
    def pair(x: jax.Array) -> jax.Array:
        return x, x

    op = jax_op("pair", namespace=NAMESPACE, fn=pair)
    with pytest.raises(TypeError, match=r"pair: the JAX function must return one array, .*; got a tuple of 2"):
        op(torch.randn(2))


def test_an_error_inside_the_jax_function_names_the_op():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as caught:
        linear(torch.randn(2, 3), torch.randn(4, 5))
    assert any("linear" in note for note in caught.value.__notes__)


def test_lazy_and_signature_give_the_same_op():
    module = types.ModuleType("bridge_lazy_kernel")
    module.double = lambda x: x * 2
    sys.modules[module.__name__] = module

    def signature(x: Tensor) -> Tensor: ...

    op = jax_op("lazy_double", namespace=NAMESPACE, fn=Lazy("bridge_lazy_kernel:double"), signature=signature)
    assert op(torch.ones(2)).tolist() == [2, 2]


def test_the_same_id_loaded_twice_gets_a_namespace_of_its_own():
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    def triple(x: jax.Array) -> jax.Array:
        return x * 3

    one = jax_op("twice", namespace="pallas_hub_bridge_twice", fn=double)
    two = jax_op("twice", namespace="pallas_hub_bridge_twice", fn=triple)
    assert (one.qualname, two.qualname) == ("pallas_hub_bridge_twice::twice", "pallas_hub_bridge_twice_2::twice")
    x = torch.ones(1)
    assert (one(x).item(), two(x).item(), one.overload(x).item()) == (2, 3, 2)


def test_any_package_name_is_a_namespace():
    op = jax_op("inside", namespace="my-kernel.sub", fn=lambda x: x, signature=lambda_signature)
    assert op.qualname == "my_kernel_sub::inside"


def lambda_signature(x: Tensor) -> Tensor: ...


# Paths


def test_each_path_runs_what_it_says():
    x = torch.randn(11, 4)
    for path in ("auto", "torch", "interpret"):
        with use_path(path), record_paths() as ran:
            assert torch.equal(scale(x, 3.0), x * 3)
        assert ran == [(scale.qualname, {"auto": "torch"}.get(path, path))]
    with use_path("interpret"), record_paths() as ran:
        gelu(x)  # plain JAX: nothing to interpret
    assert ran == [(gelu.qualname, "jax")]


def test_the_environment_forces_a_path_at_any_time(monkeypatch):
    x = torch.randn(2, 4)
    monkeypatch.setenv("PALLAS_HUB_INTERPRET", "1")
    assert (scale.path_for(x), gelu.path_for(x)) == ("interpret", "jax")
    with use_path("auto"):
        assert scale.path_for(x) == "torch"
    with record_paths() as ran:
        scale(x, 1.0)
    assert ran == [(scale.qualname, "interpret")]
    monkeypatch.setenv("PALLAS_HUB_PATH", "torch")
    assert scale.path_for(x) == "torch"
    monkeypatch.setenv("PALLAS_HUB_PATH", "fast")
    with pytest.raises(ValueError, match=r'PALLAS_HUB_PATH: path must be one of auto, pallas, torch, .*; got "fast"'):
        scale(x, 1.0)
    monkeypatch.delenv("PALLAS_HUB_PATH")
    monkeypatch.setenv("PALLAS_HUB_INTERPRET", "0")
    assert scale.path_for(x) == "torch"


def test_use_path_nests_and_restores():
    x = torch.randn(2, 4)
    with use_path("interpret"):
        with use_path("torch"):
            assert scale.path_for(x) == "torch"
        assert scale.path_for(x) == "interpret"
    assert scale.path_for(x) == "torch"


def test_interpret_params_reach_the_kernel():
    from jax.experimental.pallas import tpu as pltpu

    x = torch.randn(11, 4)
    with use_path("interpret", interpret=pltpu.InterpretParams(uninitialized_memory="nan")):
        assert torch.equal(scale(x, 3.0), x * 3)


def test_the_backward_takes_the_path_that_its_forward_was_forced_to():
    x = torch.randn(3, 4, requires_grad=True)
    with record_paths() as ran:
        with use_path("interpret"):
            y = scale(x, 3.0)
        y.sum().backward()
    assert [path for _, path in ran] == ["interpret", "interpret"]
    assert x.grad.eq(3).all()


def test_path_for_speaks_for_the_device():
    meta = torch.empty(2, 4, device="meta")
    assert scale.path_for(torch.empty(2, 4)) == "torch"
    with pytest.raises(NotImplementedError, match="gelu: has no torch path; it runs on tpu, and on cpu through JAX"):
        gelu.path_for(meta)


def test_a_path_that_cannot_run_is_refused_in_words(monkeypatch):
    x = torch.randn(2, 4)
    with use_path("pallas"), pytest.raises(RuntimeError, match=r'scale: path "pallas" needs tensors on tpu; got cpu'):
        scale(x, 1.0)
    with use_path("torch"), pytest.raises(NotImplementedError, match="gelu: has no torch path"):
        gelu(x)
    with (
        use_path("jax"),
        pytest.raises(RuntimeError, match=r"scale: path \"jax\" can't compile a Pallas kernel for cpu"),
    ):
        scale(x, 1.0)
    with use_path("interpret"), pytest.raises(RuntimeError, match=r'path "interpret" runs on cpu only; got .* meta'):
        scale.path_for(x.to("meta"))
    with pytest.raises(ValueError, match=r'use_path: path must be one of .*; got "gpu"'), use_path("gpu"):
        pass
    monkeypatch.delattr(torch, "tpu", raising=False)  # another test of this process may have loaded torch_tpu
    with pytest.raises(RuntimeError, match='scale: path "pallas" runs through torch_tpu, which is not loaded'):
        _ = scale.tpu_op


def test_mixed_devices_are_named():
    with pytest.raises(ValueError, match="linear: all tensors must be on one device; got x on cpu, w on meta"):
        linear(torch.randn(2, 3), torch.empty(3, 4, device="meta"))


def test_a_torch_path_keeps_the_promises_of_the_fake():
    def view(x: Tensor) -> Tensor:
        return x.view(-1)

    def transposed(x: Tensor) -> Tensor:
        return (x * 1).t()

    op = jax_op("view", namespace=NAMESPACE, fn=lambda x: x.reshape(-1), torch_fn=view)
    x = torch.zeros(2, 3)
    op(x).fill_(1)
    assert x.eq(0).all()

    def twins(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y.view(-1)

    op = jax_op("twins", namespace=NAMESPACE, fn=lambda x: (x + 1, x.reshape(-1) + 1), torch_fn=twins)
    one, two = op(x)
    one.fill_(7)
    assert two.eq(1).all()
    torch.library.opcheck(op.overload, (x,))
    op = jax_op("transposed", namespace=NAMESPACE, fn=lambda x: x.T, torch_fn=transposed)
    assert op(x).is_contiguous()
    for rows, columns in ((2, 3), (3, 1), (1, 3), (0, 3)):
        torch.library.opcheck(op.overload, (torch.zeros(rows, columns),))


def test_traces_are_counted_once_per_shape_dtype_and_attributes():
    def add(x: jax.Array, n: int = 1) -> jax.Array:
        return x + n

    op = jax_op("add_n", namespace=NAMESPACE, fn=add)
    for length in (3, 4, 3, 4):
        op(torch.ones(length), 1)
    assert op.traces == 2
    op(torch.ones(3), 2)
    assert op.traces == 3
    op(torch.ones(3, dtype=torch.int32), 2)
    assert op.traces == 4


def test_attributes_that_compare_oddly_are_told_apart_and_traced_once():
    def times(x: jax.Array, low: float | None = None) -> jax.Array:
        return x if low is None else x * low

    op = jax_op("times_low", namespace=NAMESPACE, fn=times)
    x, nan = torch.ones(3), float("nan")
    for low in (0.0, -0.0, 0.0, -0.0):
        assert torch.equal(op(x, low).signbit(), torch.full((3,), math.copysign(1, low) < 0))
    for _ in range(3):
        assert op(x, nan).isnan().all()
        assert op(x, float("nan")).isnan().all()
    assert op(x, None).eq(1).all()
    assert op.traces == 4


def test_recorders_see_other_threads_and_nest():
    import threading

    x = torch.randn(2, 4)
    with record_paths() as outer:
        with record_paths() as inner:
            thread = threading.Thread(target=scale, args=(x, 1.0))
            thread.start()
            thread.join()
        scale(x, 1.0)
    assert (len(inner), len(outer)) == (1, 2)


def test_many_threads_share_an_op():
    from concurrent.futures import ThreadPoolExecutor

    def work(i):
        x = torch.full((16,), float(i))
        return all(
            torch.equal(gelu(x), torch.nn.functional.gelu(x, approximate="tanh"))
            or torch.allclose(gelu(x), torch.nn.functional.gelu(x, approximate="tanh"))
            for _ in range(50)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))


def test_jnp_float64_is_not_used_behind_the_scenes():
    assert gelu(torch.ones(2)).dtype is torch.float32
    assert jnp.zeros(1).dtype == jnp.float32
