# ruff: noqa: E501 - a message is easier to compare in one line
"""router_topk in torch: against the routers of Transformers, on every path, its gradients, and in which words it refuses."""

import copy
import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import MethodType

import moe_experts as package
import pytest
import torch
from moe_experts import router_topk
from moe_experts._bridge import record_paths, use_path
from moe_experts.router import route, router_topk_op
from moe_experts_router_checks import ROUTES, inputs_of, loop, tolerance

HIDDEN, EXPERTS = 32, 16
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": 4}
GROUPS = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2}
RENORMALIZED, SIGMOID = {"renormalize": True}, {"score": "sigmoid", "renormalize": True}


def in_groups(router, **options):
    return {
        "groups": router.num_group,
        "top_groups": router.topk_group,
        "scale": router.routed_scaling_factor,
        **options,
    }


def biased(router, **options):
    return {"bias": router.e_score_correction_bias, **options}


# model, router, config, what the config is given, router -> what router_topk is given
ROUTERS = [
    ("qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig", {"num_experts": EXPERTS}, lambda r: {}),
    (
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        "Qwen3MoeConfig",
        {"num_experts": EXPERTS, "norm_topk_prob": True},
        lambda r: RENORMALIZED,
    ),
    ("qwen3_5_moe", "Qwen3_5MoeTopKRouter", "Qwen3_5MoeTextConfig", {"num_experts": EXPERTS}, lambda r: RENORMALIZED),
    ("laguna", "LagunaTopKRouter", "LagunaConfig", {"num_experts": EXPERTS}, lambda r: biased(r, **SIGMOID)),
    ("mixtral", "MixtralTopKRouter", "MixtralConfig", {"num_local_experts": EXPERTS}, lambda r: RENORMALIZED),
    (
        "gpt_oss",
        "GptOssTopKRouter",
        "GptOssConfig",
        {"num_local_experts": EXPERTS},
        lambda r: {"score": "topk_softmax"},
    ),
    ("deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config", GROUPS, lambda r: in_groups(r, **biased(r, **SIGMOID))),
    (
        "glm4_moe",
        "Glm4MoeTopkRouter",
        "Glm4MoeConfig",
        {**GROUPS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        lambda r: in_groups(r, **biased(r, score="sigmoid")),
    ),
    ("mistral4", "Mistral4TopkRouter", "Mistral4Config", GROUPS, lambda r: in_groups(r, renormalize=r.norm_topk_prob)),
    ("minimax_m2", "MiniMaxM2TopKRouter", "MiniMaxM2Config", {"num_local_experts": EXPERTS}, lambda r: SIGMOID),
]
routers = pytest.mark.parametrize(
    ("model", "name", "config", "given", "options"),
    ROUTERS,
    ids=lambda value: "options" if callable(value) else str(value)[:30],
)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(model, name, config, given, dtype=torch.float32):
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    configs = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    router = getattr(module, name)(getattr(configs, config)(**SIZES, **given))
    for seed, tensor in enumerate([*router.parameters(), *router.buffers()], start=1):
        tensor.data.copy_(draw(*tensor.shape, seed=seed) * 0.3)
    return router.to(dtype)


def by_index(weights, index):
    """In the order of the index: some routers leave the order of their choices open."""
    index, order = index.sort(dim=1)
    return weights.gather(1, order), index


@routers
@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
def test_equals_the_router_of_transformers(model, name, config, given, options, path):
    router = build(model, name, config, given)
    x, upstream = draw(11, HIDDEN, seed=7), draw(11, 4, seed=8)
    more = {"e_score_correction_bias": draw(EXPERTS, seed=9) * 0.3} if model == "minimax_m2" else {}
    logits, wanted, wanted_index = router(x, **more)
    leaf = logits.detach().requires_grad_()
    named = {**options(router), **({"bias": more["e_score_correction_bias"]} if more else {})}
    with use_path(path):
        weights, index = router_topk(leaf, router.top_k, **named)
        weights_in_order, index_in_order = by_index(weights, index)
        (grad,) = torch.autograd.grad(weights_in_order, leaf, upstream)
    wanted_in_order, wanted_index = by_index(wanted, wanted_index)
    assert (weights.dtype, index.dtype) == (torch.float32, torch.int64)
    assert torch.equal(index_in_order, wanted_index)
    # The same operations, to the last bit; but a router that leaves the order open may sum in another one.
    exact = path != "interpret" and model not in ("deepseek_v3", "mistral4", "minimax_m2")
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(weights_in_order, wanted_in_order, **close)
    (wanted_grad,) = torch.autograd.grad(wanted_in_order, logits, upstream)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-6)


@routers
def test_equals_the_router_of_transformers_in_bfloat16(model, name, config, given, options):
    if model == "mistral4":
        pytest.skip("its softmax is taken in bfloat16, ours in float32")
    router = build(model, name, config, given, torch.bfloat16)
    more = {"e_score_correction_bias": draw(EXPERTS, seed=9) * 0.3} if model == "minimax_m2" else {}
    logits, wanted, wanted_index = router(draw(11, HIDDEN, seed=7, dtype=torch.bfloat16), **more)
    named = {**options(router), **({"bias": more["e_score_correction_bias"]} if more else {})}
    wide = wanted.dtype == torch.float32 or model == "laguna"
    weights, index = router_topk(logits.float() if wide else logits, router.top_k, **named)
    (weights, index), (wanted, wanted_index) = by_index(weights, index), by_index(wanted, wanted_index)
    assert torch.equal(index, wanted_index)
    torch.testing.assert_close(weights.to(wanted.dtype), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
@pytest.mark.parametrize("case", [ROUTES[i] for i in (0, 4, 5, 6, 9, 11)], ids=lambda case: case.id)
def test_equals_a_loop(case, path):
    dtype = getattr(torch, case.dtype)
    logits, bias = inputs_of(case)
    logits = logits + draw(*logits.shape).numpy() * 2**-6  # no two equal: torch.topk takes any of them
    logits = torch.from_numpy(logits).to(dtype)
    with use_path(path):
        weights, index = router_topk(logits, bias=None if bias is None else torch.from_numpy(bias), **case.options)
    wanted, wanted_index = loop(case, logits.double().numpy(), bias)
    torch.testing.assert_close(
        weights.double(), torch.from_numpy(wanted), rtol=0, atol=tolerance(case, torch.finfo(dtype).eps)
    )
    if len(set(logits[0].tolist())) == case.e:
        assert torch.equal(index[0], torch.from_numpy(wanted_index)[0])


GRADIENTS = [
    {},
    {"renormalize": True},
    {"score": "sigmoid", "scale": 0.5},
    {"score": "sigmoid", "renormalize": True, "scale": 2.5, "groups": 4, "top_groups": 2, "bias": True},
    {"score": "topk_softmax"},
    {"scale": 3.0, "bias": True},
    {"renormalize": True, "epsilon": 0.25, "scale": 2.0},
    {"score": "sigmoid", "renormalize": True, "epsilon": 0.25},
    {"groups": 4, "top_groups": 2, "best_of_group": 1},
]


@pytest.mark.parametrize("options", GRADIENTS, ids=str)
def test_gradients_of_the_op_against_differences(options):
    """In float64, first and second order; on the direct path torch's own gradients are at work."""
    logits = draw(5, 16).double().requires_grad_()
    options = {**options, "bias": draw(16, seed=1).double() if options.get("bias") else None}

    def weights(logits):
        with use_path("torch"):
            return router_topk(logits, 3, **options)[0]

    assert torch.autograd.gradcheck(weights, (logits,))
    assert torch.autograd.gradgradcheck(weights, (logits,))


def test_bias_only_steers_the_choice():
    logits, bias = draw(6, 16).requires_grad_(), draw(16, seed=1).requires_grad_()
    for path in ("auto", "torch"):
        with use_path(path):
            weights, index = router_topk(logits, 3, score="sigmoid", bias=bias)
        torch.testing.assert_close(weights, logits.sigmoid().gather(1, index))
        assert torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)


@pytest.mark.parametrize("path", ["auto", "interpret"])
def test_nan_and_infinity(path):
    nan, inf = float("nan"), float("inf")
    with use_path(path):
        weights, index = router_topk(torch.tensor([[0.0, nan, 1.0, 2.0], [0.0, 1.0, -inf, -inf]]), 3)
        chosen = router_topk(torch.tensor([[0.0, 1.0, nan, 2.0]]), 2, score="sigmoid")
        zero = router_topk(torch.full((1, 4), -inf), 2, score="sigmoid", renormalize=True)[0]
    assert weights[0].isnan().all()
    assert len(set(index[0].tolist()) & {0, 1, 2, 3}) == 3
    torch.testing.assert_close(weights[1], torch.tensor([0.731059, 0.268941, 0.0]))
    assert index[1, :2].tolist() == [1, 0]
    assert chosen[1].tolist() == [[2, 3]]
    torch.testing.assert_close(chosen[0], torch.tensor([[nan, 0.880797]]), equal_nan=True)
    assert zero.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
def test_no_tokens_and_strided_logits(path):
    with use_path(path):
        weights, index = router_topk(torch.empty(0, 6), 2)
        assert (weights.shape, index.shape, index.dtype) == ((0, 2), (0, 2), torch.int64)
        logits = draw(6, 9)
        for one, other in zip(router_topk(logits.t(), 2), router_topk(logits.t().contiguous(), 2), strict=True):
            assert torch.equal(one, other)


def test_which_code_runs():
    logits = draw(3, 8)
    for path, took in (("torch", "torch"), ("interpret", "interpret"), ("auto", "torch")):
        with use_path(path), record_paths() as ran:
            router_topk(logits, 2)
        assert ran == [("moe_experts::router_topk", took)]


def test_opcheck():
    for logits, bias in ((draw(6, 16), None), (draw(16, 6).t().requires_grad_(), draw(16)), (torch.empty(0, 16), None)):
        torch.library.opcheck(router_topk_op.overload, (logits, bias, 3, "sigmoid", True, 2.0, 4, 2, 1, 1e-6))


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("path", ["auto", "torch"])
def test_compiled_it_is_one_graph_for_all_sizes(path):
    options = {"score": "sigmoid", "renormalize": True, "groups": 4, "top_groups": 2, "bias": draw(16, seed=1)}
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: router_topk(x, 3, **options), fullgraph=True, dynamic=True, backend=count)
    with use_path(path), torch.no_grad():
        for t in (2, 7, 33):
            for got, wanted in zip(compiled(draw(t, 16)), router_topk(draw(t, 16), 3, **options), strict=True):
                torch.testing.assert_close(got, wanted)
    assert len(graphs) == 1


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_gradients_are_the_same():
    def loss(x):
        return router_topk(x, 3, renormalize=True)[0].square().sum()

    grads = []
    for path in ("auto", "torch"):
        for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            x = draw(5, 16).requires_grad_()
            with use_path(path):
                function(x).backward()
            grads.append(x.grad)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


@pytest.mark.parametrize("path", ["auto", "torch", "interpret"])
def test_vmap_equals_a_loop(path):
    logits = draw(2, 3, 8)
    with use_path(path):
        weights, index = torch.func.vmap(lambda x: router_topk(x, 2))(logits)
        for n in range(2):
            wanted, wanted_index = router_topk(logits[n], 2)
            assert torch.equal(weights[n], wanted)
            assert torch.equal(index[n], wanted_index)


def swapped(router):
    """What kernels.kernelize does to an instance."""
    new = copy.deepcopy(router)
    new.forward = MethodType(package.layers.SoftmaxTopKRouter.forward, new)
    return new


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("number", [2, 3], ids=["qwen3_5_moe", "laguna"])
def test_layer_gives_what_the_routers_of_its_name_give(number, limit, dtype, path):
    router = build(*ROUTERS[number][:4], dtype)
    if number == 3:
        router.router_logit_softcapping = limit
    x = draw(2, 5, HIDDEN, dtype=dtype)
    results = []
    for module in (router, swapped(router)):
        leaf = x.clone().requires_grad_()
        with use_path(path), record_paths() as ran:
            logits, weights, index = module(leaf)
        assert ran == [("moe_experts::router_topk", "torch")] * (module is not router)
        results.append(
            (
                logits,
                *by_index(weights, index),
                *torch.autograd.grad(weights.square().sum() + logits.sum(), (leaf, module.weight)),
            )
        )
    for got, wanted in zip(results[1], results[0], strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)


def test_layer_without_a_kernel_runs_the_forward_of_the_class(monkeypatch):
    router = swapped(build(*ROUTERS[2][:4]))
    monkeypatch.setattr(type(router), "forward", lambda self, x: "its own")
    assert router(draw(3, HIDDEN)) == "its own"
    with use_path("torch"):
        assert router(draw(3, HIDDEN))[2].shape == (3, 4)


def test_layer_stands_for_every_class_of_its_name():
    """A third router of this name, or one that changed, has to be looked at first."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("kernels")
    mark = re.compile(r'@use_kernel_forward_from_hub\("SoftmaxTopKRouter"\)\nclass (\w+)')
    files = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    marked = [name for file in files for name in mark.findall(file.read_text(encoding="utf-8"))]
    assert marked == ["LagunaTopKRouter", "Qwen3_5MoeTopKRouter"]
    validate = importlib.import_module("kernels.layer.layer")._validate_layer
    for number in (2, 3):
        validate(
            check_cls=type(build(*ROUTERS[number][:4])),
            cls=package.layers.SoftmaxTopKRouter,
            repo="pallas-hub/moe-experts",
        )


def test_layer_goes_into_a_model_by_the_mapping_of_the_kernels_library():
    """Through our own repository class, which takes a module that is loaded already."""
    kernels = pytest.importorskip("kernels")
    loading, repository = (importlib.import_module(f"pallas_hub.layers.{name}") for name in ("loading", "repository"))
    kernel = loading.Kernel("pallas-hub/moe-experts", 1, None, package)
    layer = repository.PallasLayerRepository(kernel.repo_id, layer_name="SoftmaxTopKRouter", version=1, kernel=kernel)
    router = build(*ROUTERS[2][:4]).eval()
    x = draw(5, HIDDEN)
    wanted = router(x)
    with kernels.use_kernel_mapping({"SoftmaxTopKRouter": {"cpu": layer}}, inherit_mapping=False):
        kernels.kernelize(router, mode=kernels.Mode.INFERENCE, device="cpu")
    with use_path("interpret"), record_paths() as ran:
        got = router(x)
    assert ran == [("moe_experts::router_topk", "interpret")]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


LOGITS = torch.zeros(4, 12)


@pytest.mark.parametrize("path", ["auto", "interpret"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": [[0.0]]}, TypeError, r"logits must be a tensor; got list\. Try torch\.tensor\(logits\)\."),
        ({"logits": LOGITS.int()}, TypeError, r"logits is int32; supported: float32, bfloat16, float16, float64\. Try logits\.float\(\)\."),
        (
            {"logits": torch.zeros(2, 3, 12)},
            ValueError,
            r"logits must be \(t, e\), tokens by experts; got \(2, 3, 12\)\. Try logits\.reshape\(-1, logits\.shape\[-1\]\)\.",
        ),
        ({"score": "tanh"}, ValueError, r"score must be one of softmax, sigmoid, topk_softmax; got \"tanh\"\."),
        ({"top_k": 2.0}, TypeError, r"top_k must be an int; got float\."),
        ({"top_k": True}, TypeError, r"top_k must be an int; got bool\."),
        ({"top_k": 0}, ValueError, r"top_k must be 1 \.\.\. e = 1 \.\.\. 12 for logits \(t, e\); got 0\."),
        ({"top_k": 13}, ValueError, r"top_k must be 1 \.\.\. e = 1 \.\.\. 12 for logits \(t, e\); got 13\."),
        ({"groups": 5}, ValueError, r"groups must divide e = 12 for logits \(t, e\); got 5\."),
        ({"groups": 4, "top_groups": 5}, ValueError, r"top_groups must be 1 \.\.\. groups = 1 \.\.\. 4; got 5\."),
        ({"groups": 4, "best_of_group": 3}, ValueError, r"best_of_group must be 2 or 1; got 3\."),
        ({"groups": 4, "top_k": 4}, ValueError, r"top_k must be at most top_groups \* e / groups = 3, the experts that a token may use; got 4\."),
        ({"bias": torch.zeros(11)}, ValueError, r"bias must be \(e,\) = \(12,\) to match logits \(t, e\) = \(4, 12\); got \(11,\)\."),
        ({"bias": torch.zeros(12).int()}, TypeError, r"bias is int32; supported: .*\. Try bias\.float\(\)\."),
        ({"bias": 0.0}, TypeError, r"bias must be a tensor; got float\. Try torch\.tensor\(bias\)\."),
        ({"bias": torch.zeros(12, device="meta")}, ValueError, r"logits and bias must be on one device; got logits on cpu, bias on meta\. Try bias\.to\(logits\.device\)\."),
    ],
)  # fmt: skip
def test_what_is_refused(change, error, message, path):
    with use_path(path), pytest.raises(error, match=r"^router_topk: " + message + "$"):
        router_topk(**{"logits": LOGITS, "top_k": 2, **change})


def test_the_torch_code_is_shared_by_both_torch_paths():
    logits = draw(5, 16)
    with use_path("torch"):
        weights, index = router_topk(logits, 3, score="sigmoid")
    wanted = route(logits, None, 3, "sigmoid", False, 1.0, 1, 1, 2, 0.0)
    assert torch.equal(weights, wanted[0])
    assert torch.equal(index, wanted[1])


ON_TPU = """
import torch
import torch_tpu._loader
torch_tpu._loader._init_device("tpu")
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from moe_experts import router_topk
from moe_experts.router import router_topk_op

class Ours(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace.startswith("moe_experts"):
            self.ops.append(str(function))
        return function(*args, **(kwargs or {}))

with FakeTensorMode():
    bias = torch.empty(32, device="tpu")
    for tokens in (1, 18, 300):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = torch.empty(tokens, 32, device="tpu", dtype=dtype, requires_grad=True)
            assert router_topk_op.path_for(logits) == "pallas"
            with Ours() as ours:
                weights, index = router_topk(logits, 4, score="sigmoid", groups=4, top_groups=2, bias=bias)
            assert ours.ops == ["moe_experts.router_topk.default"]
            assert (weights.shape, weights.dtype, weights.device.type) == ((tokens, 4), dtype, "tpu")
            assert (index.shape, index.dtype, index.device.type) == ((tokens, 4), torch.int64, "tpu")
            assert weights.grad_fn is not None and index.grad_fn is None
print("router on tpu: ok")
"""


def test_tensors_on_a_tpu_take_the_pallas_path():
    """Nothing is run: fake tensors have shapes and a device, no values."""
    pytest.importorskip("torch_tpu", reason="skipped: needs torch_tpu")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "JAX_PLATFORMS": "cpu",
        # What libtpu would otherwise ask the network for.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(ON_TPU)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "router on tpu: ok" in ran.stdout, ran.stderr[-3000:]
