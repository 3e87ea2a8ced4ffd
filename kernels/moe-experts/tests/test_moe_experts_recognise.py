"""Modules of Transformers get the fused op: what their functions compute is found, once, also while compiling."""

import functools
import importlib

import pytest
import torch
from moe_experts import experts_forward, recognise
from moe_experts._bridge import record_paths, use_path
from moe_experts.recognise import Between, names_of
from moe_experts.torch_path import gate_function

pytest.importorskip("transformers")
from transformers.activations import ACT2FN

FUSED = "moe_experts::moe_experts"
NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
# One class per layout that Transformers has, and per gate of its own.
EXPERTS = {
    "qwen3_moe.Qwen3MoeExperts": ("Qwen3MoeConfig", Between("silu", "concatenated")),
    "gpt_oss.GptOssExperts": ("GptOssConfig", Between("swiglu_oss", "interleaved", 7.0)),
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": (
        "OpenAIPrivacyFilterConfig",
        Between("swiglu_oss", "concatenated", 7.0),
    ),
    "aria.AriaExperts": ("AriaTextConfig", Between("silu", "concatenated")),
    "nemotron_h.NemotronHExperts": ("NemotronHConfig", Between("relu2", None)),
    "deepseek_v4.DeepseekV4Experts": ("DeepseekV4Config", Between("silu", "concatenated", 10.0)),
    "gemma4.Gemma4TextExperts": ("Gemma4TextConfig", Between("gelu_tanh", "concatenated")),
}
SIZES = {
    "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 12, "moe_hidden_size": 16,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "moe_latent_size": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_known():
    recognise._found.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Module(torch.nn.Module):
    """An experts module as far as the search looks at it, with the default gate of Transformers."""

    has_gate = True

    def __init__(self, act_fn=None, **values):
        super().__init__()
        self.act_fn = act_fn
        for name, value in values.items():
            setattr(self, name, value)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Clamped(Module):
    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class ClampedAfter(Module):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(min=-self.limit, max=self.limit)


class Swapped(Module):
    def _apply_gate(self, gate_up):
        up, gate = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class FromConfig(Module):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up * self.config.scale


class Ungated(Module):
    has_gate = False


def build(path, dtype=torch.float32):
    module, name = path.split(".")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(
        importlib.import_module(f"transformers.models.{module}.configuration_{module}"), EXPERTS[path][0]
    )()
    for key, value in SIZES.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._experts_implementation = "eager"
    experts = getattr(modeling, name)(config)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype).eval()


def inputs(t=10):
    torch.manual_seed(1)
    scores, index = torch.rand(t, 6).softmax(-1).topk(3)
    return torch.randn(t, 16), index, scores


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_activations_of_transformers(name):
    if name == "xielu":
        pytest.skip("asks for a compiled package, and says so on standard error")
    found = names_of(Module(ACT2FN[name]))
    if name in NAMES:
        assert found == Between(NAMES[name], "concatenated")
    else:
        assert callable(found.activation)
        assert callable(found.gate)
    assert (names_of(module := Ungated(ACT2FN[name])).activation) == NAMES.get(name, module.act_fn)


@pytest.mark.parametrize("limit", [0.5, 1.0, 7.0, 10, 100.0])
def test_limits(limit):
    assert names_of(Clamped(limit=limit, alpha=1.702)) == Between("swiglu_oss", "interleaved", limit)


@pytest.mark.parametrize(
    "module",
    [
        Clamped(limit=7.0, alpha=1.7),
        Clamped(limit=7.0, alpha=1.0),
        Clamped(limit=-1.0, alpha=1.702),
        ClampedAfter(torch.nn.SiLU(), limit=7.0),
        Swapped(torch.nn.SiLU()),
        FromConfig(torch.nn.SiLU(), config=type("Config", (), {"scale": 1.0})),
        Module(None),
        Module(lambda x: x.sum(-1)),
        Module(lambda x: "no tensor"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_has_no_name_stays_a_function(module):
    found = names_of(module)
    assert found.limit is None
    assert found.activation is module.act_fn
    assert found.gate == module._apply_gate


def test_where_a_limit_after_the_activation_is_the_same_as_before_it():
    """silu of 100 is 100, but silu of 7 is less than 7."""
    assert names_of(ClampedAfter(torch.nn.SiLU(), limit=100.0)) == Between("silu", "concatenated", 100.0)


class Optional(Module):
    """A limit that some modules have, read by its name in a string, by a method of its own."""

    def _cut(self, gate, up):
        limit = getattr(self, "limit", None)
        return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(min=-limit, max=limit))

    def _apply_gate(self, gate_up):
        gate, up = self._cut(*gate_up.float().chunk(2, dim=-1))
        return self.act_fn(gate) * up


def test_a_number_that_only_some_modules_have():
    assert names_of(Optional(torch.nn.SiLU(), limit=5.0)) == Between("silu", "concatenated", 5.0)
    assert names_of(Optional(torch.nn.SiLU())) == Between("silu", "concatenated")
    assert names_of(Optional(torch.nn.SiLU(), limit=3)) == Between("silu", "concatenated", 3.0)
    for tensor in (torch.tensor(5.0), torch.nn.Parameter(torch.tensor(5.0))):
        module = Optional(torch.nn.SiLU(), limit=tensor)
        assert names_of(module) == Between(module.act_fn, module._apply_gate)


class Given(torch.nn.Module):
    """An activation that is handed its function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("wrap", [lambda function: function, Given], ids=["function", "module"])
def test_activations_of_one_type_are_told_apart(wrap):
    gelu = torch.nn.functional.gelu
    functions = {
        gelu: "gelu",
        torch.tanh: "tanh",
        torch.relu: "relu",
        functools.partial(gelu, approximate="tanh"): "gelu_tanh",
        functools.partial(gelu): "gelu",
    }
    for function, name in functions.items():
        assert names_of(Module(wrap(function))).activation == name


@pytest.mark.parametrize(
    "act",
    [
        torch.nn.PReLU(init=0.0),  # relu, until it has learned
        torch.nn.Sequential(torch.nn.SiLU()),
        Given(torch.nn.SiLU()),
        torch.nn.SiLU().forward,
        functools.partial(torch.where, torch.tensor(True)),
        functools.partial(torch.nn.PReLU(init=0.0)),
    ],
    ids=["learns", "modules", "module", "method", "tensor", "partial"],
)
def test_what_may_change_or_differ_unseen_stays_a_function(act):
    module = Module(act)
    assert names_of(module) == Between(act, module._apply_gate)


def test_a_gate_of_the_module_itself_and_not_of_its_class():
    names_of(Module(torch.nn.SiLU()))
    module = Module(torch.nn.SiLU())
    module._apply_gate = lambda y: y[..., ::2]
    assert names_of(module) == Between(module.act_fn, module._apply_gate)


def test_one_look_per_class_and_numbers(monkeypatch):
    looks, compare = [], recognise._compare
    monkeypatch.setattr(recognise, "_compare", lambda module: looks.append(type(module)) or compare(module))
    modules = [Clamped(limit=7.0, alpha=1.702) for _ in range(3)] + [Module(torch.nn.SiLU()) for _ in range(3)]
    for module in modules * 2:
        names_of(module)
    assert looks == [Clamped, Module]
    modules[0].limit = 5.0
    assert names_of(modules[0]).limit == 5.0
    assert names_of(modules[1]).limit == 7.0
    assert names_of(Module(torch.nn.GELU("tanh"))).activation == "gelu_tanh"
    assert names_of(Module(torch.nn.GELU())).activation == "gelu"


class Named(Module):
    """A gate that computes what `own` says; the numbers a and b belong to it."""

    own = None

    def _apply_gate(self, gate_up):
        assert self.a != self.b
        return type(self).own(gate_up)


@pytest.mark.parametrize("limits", [(0.7, 0.9), (3, 250.0)], ids=str)
def test_the_sample_tells_all_names_and_limits_apart(limits, monkeypatch):
    for candidate in recognise._candidates(True, list(limits)):
        monkeypatch.setattr(Named, "own", staticmethod(gate_function(*candidate)))
        assert recognise._compare(Named(a=limits[0], b=limits[1])) == candidate


@pytest.mark.parametrize("path", EXPERTS)
def test_modules_of_transformers_take_the_fused_op(path):
    experts, (x, index, scores) = build(path), inputs()
    assert names_of(experts) == EXPERTS[path][1]
    with torch.no_grad():
        wanted = experts(x, index, scores)
        with use_path("interpret"), record_paths() as ran:
            got = experts_forward(experts, x, index, scores)
    assert ran == [(FUSED, "interpret")]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", EXPERTS)
def test_as_torch_code_modules_run_their_own_functions(path, monkeypatch):
    experts, (x, index, scores) = build(path), inputs()
    calls, own = [], type(experts)._apply_gate
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, y: calls.append(1) or own(self, y))
    x.requires_grad_(), scores.requires_grad_()
    leaves = (x, scores, *experts.parameters())
    wanted = experts(x, index, scores)
    calls.clear()
    got = experts_forward(experts, x, index, scores)
    assert len(calls) == (1 if experts.has_gate else 0)
    assert not recognise._found
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, leaves, upstream)
    for one, other in zip(torch.autograd.grad(got, leaves, upstream), wanted_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_norm_after_each_expert_is_torch_code():
    experts, (x, index, scores) = build("qwen3_moe.Qwen3MoeExperts"), inputs()
    experts.has_post_expert_norm, experts.post_expert_norm = True, torch.nn.RMSNorm(16)
    with torch.no_grad(), use_path("interpret"), record_paths() as ran:
        experts_forward(experts, x, index, scores)
    assert [op for op, _ in ran] == ["moe_experts__ragged_dot::ragged_dot"] * 2


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """The fused op in place of the composition, as on a TPU; its torch path runs."""
    import moe_experts.op
    import moe_experts.transformers_experts

    for module in (moe_experts.op, moe_experts.transformers_experts):
        monkeypatch.setattr(module, "runs_fused", lambda *tensors: True)


@pytest.mark.parametrize(
    ("path", "dynamic"),
    [("gpt_oss.GptOssExperts", None), ("gpt_oss.GptOssExperts", True), ("gemma4.Gemma4TextExperts", None)],
)
def test_compiled_before_anything_was_seen(path, dynamic, as_on_a_tpu):
    """One graph serves all layers of a model: it is tied to the numbers, not to the module that was looked at."""
    graphs = []

    def count(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    layers, (x, index, scores) = [build(path) for _ in range(4)], inputs()
    compiled = torch.compile(experts_forward, fullgraph=True, dynamic=dynamic, backend=count)
    with torch.no_grad():
        for layer in layers:
            torch.testing.assert_close(compiled(layer, x, index, scores), layer(x, index, scores), rtol=1e-4, atol=1e-4)
        assert len(graphs) <= 2  # the first is tied to the module that was looked at
        assert all(any("moe_experts" in node for node in graph) for graph in graphs)
        if path.startswith("gpt_oss"):
            for limit in (2.0, 3):
                layers[0].limit = limit
                wanted = layers[0](x, index, scores)
                torch.testing.assert_close(compiled(layers[0], x, index, scores), wanted, rtol=1e-4, atol=1e-4)


def test_a_gate_without_a_name_compiles_as_torch_code(monkeypatch):
    experts, (x, index, scores) = build("gpt_oss.GptOssExperts").requires_grad_(False), inputs()
    experts.alpha = 1.5
    monkeypatch.setattr("moe_experts.transformers_experts.runs_fused", lambda *tensors: True)
    compiled = torch.compile(experts_forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(experts, x, index, scores), experts(x, index, scores), rtol=1e-4, atol=1e-5)


def test_exported_with_the_fused_op(as_on_a_tpu):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = build("gpt_oss.GptOssExperts").requires_grad_(False)

        def forward(self, x, index, scores):
            return experts_forward(self.experts, x, index, scores)

    layer, tokens = Layer(), torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(layer, inputs(), dynamic_shapes=({0: tokens},) * 3)
    assert "moe_experts.moe_experts" in str(program.graph)
    x, index, scores = inputs(7)
    wanted = layer.experts(x, index, scores)
    torch.testing.assert_close(program.module()(x, index, scores), wanted, rtol=1e-4, atol=1e-4)


def test_looked_at_under_fake_tensors_and_autocast():
    from torch._subclasses.fake_tensor import FakeTensorMode

    experts = build("gpt_oss.GptOssExperts")
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert names_of(experts) == EXPERTS["gpt_oss.GptOssExperts"][1]
