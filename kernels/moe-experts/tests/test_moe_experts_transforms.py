"""torch.compile, export, vmap, checkpointing and autocast; and the Pallas path on a TPU, with fake tensors."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import moe_experts as package
import pytest
import torch
from moe_experts import moe_experts
from moe_experts._bridge import record_paths, use_path
from moe_experts.op import _fused
from torch.utils.checkpoint import checkpoint

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
OSS = {"activation": "swiglu_oss", "gate": "interleaved", "limit": 1.5}


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


def _oss(*arguments):
    return moe_experts(*arguments, **OSS)


def _fused_oss(x, gate_up, down, index, scores):
    """The fused op by itself: on CPU its torch path, which only a TPU's tensors would reach by moe_experts."""
    return _fused(x, gate_up, down, index, scores, None, None, None, None, "swiglu_oss", "interleaved", 1.5, False)


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
@pytest.mark.parametrize(("backend", "function"), [("aot_eager", _oss), ("inductor", moe_experts)])
def test_compiled_layer_is_one_graph_with_the_same_gradients(backend, function):
    arguments = _layer(32)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    _assert_all_close(_with_gradients(compiled, arguments), _with_gradients(function, arguments))


@pytest.mark.parametrize("function", [_oss, _fused_oss], ids=["composition", "fused"])
def test_dynamic_shapes_compile_at_most_twice(function):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for t in (1, 2, 7, 33, 128):
            arguments = _layer(t)
            torch.testing.assert_close(compiled(*arguments), _oss(*arguments), **CLOSE)
    assert len(graphs) <= 2


@pytest.mark.parametrize("function", [_oss, _fused_oss], ids=["composition", "fused"])
def test_export_with_any_number_of_tokens(function):
    class Experts(torch.nn.Module):
        def forward(self, x, gate_up, down, index, scores):
            return function(x, gate_up, down, index, scores)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        Experts(), _layer(6), dynamic_shapes=({0: tokens}, None, None, {0: tokens}, {0: tokens})
    )
    for t in (2, 45):
        torch.testing.assert_close(program.module()(*_layer(t)), _oss(*_layer(t)), **CLOSE)


def test_the_first_call_of_a_process_may_be_compiled():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(package.__file__).parents[1])!r}); import torch, moe_experts; "
        "layer = torch.ones(2, 3), torch.ones(4, 4, 3), torch.ones(4, 3, 2); "
        "layer += torch.tensor([[0], [4]]), torch.ones(2, 1); "
        "f = lambda *a: moe_experts.moe_experts(*a, activation='relu'); "
        "print(torch.compile(f, fullgraph=True, backend='aot_eager')(*layer).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[[18.0, 18.0, 18.0], [0.0, 0.0, 0.0]]", done.stderr


def test_importing_the_kernel_imports_no_compiler_and_no_jax():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(package.__file__).parents[1])!r}); import moe_experts; "
        "print([m for m in ('jax', 'transformers', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("path", ["torch", "interpret"])
def test_vmap_equals_a_loop(path):
    x, gate_up, down, index, scores = _layer(6)
    split = [a.view(2, 3, -1) for a in (x, index, scores)]
    with use_path(path), record_paths() as ran:
        got = torch.func.vmap(_oss, in_dims=(0, None, None, 0, 0))(split[0], gate_up, down, *split[1:])
    torch.testing.assert_close(got.view(6, -1), _oss(x, gate_up, down, index, scores), **CLOSE)
    assert ("moe_experts::moe_experts", "interpret") in ran or path == "torch"


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_nothing(autocast):
    arguments = _layer(32)

    def plain(*a):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return _oss(*a)

    def checkpointed(*a):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return checkpoint(_oss, *a, use_reentrant=False)

    _assert_all_close(_with_gradients(checkpointed, arguments), _with_gradients(plain, arguments))


def test_autocast_computes_in_its_dtype():
    arguments = _layer(9)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = _oss(*arguments)
    narrow = _oss(*(a.bfloat16() if a.is_floating_point() and a.dim() > 1 else a for a in arguments))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, narrow.float(), rtol=0.02, atol=0.02)


ON_TPU = """
import functools
import torch
import torch_tpu._loader
torch_tpu._loader._init_device("tpu")
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from moe_experts import FORMATS, experts_forward, moe_experts
from moe_experts.op import _fused
from moe_experts.quantized import DTYPES
from moe_experts.quantized_dot import _product

class Ours(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace.startswith("moe_experts"):
            self.ops.append(str(function))
        return function(*args, **(kwargs or {}))

def ops_of(call, *arguments):
    with Ours() as ours:
        y = call(*arguments)
    x = arguments[-3] if call is experts_forward else arguments[0]
    assert (y.shape, y.device.type, y.dtype) == (x.shape, "tpu", x.dtype)
    return ours.ops

def quantized(rows, columns, format):
    stored = FORMATS[format]
    data = torch.empty(4, stored.data_rows(rows), columns, dtype=DTYPES[stored.kind], device="tpu")
    return data, torch.empty(4, *stored.scale_shape(rows, columns), device="tpu")

QUANTIZED_PRODUCTS = ["moe_experts.quantized_dot.default"] * 2
FUSED, PRODUCTS = ["moe_experts.moe_experts.default"], ["moe_experts__ragged_dot.ragged_dot.default"] * 2
experts = GptOssExperts(GptOssConfig(hidden_size=32, intermediate_size=16, num_local_experts=4))
with FakeTensorMode():
    for name, weight in experts._parameters.items():
        experts._parameters[name] = torch.nn.Parameter(torch.empty(weight.shape, device="tpu"))
    assert _fused.path_for(experts.down_proj) == "pallas"
    for tokens in (1, 18, 300):
        routed = torch.empty(tokens, 2, dtype=torch.int64, device="tpu"), torch.empty(tokens, 2, device="tpu")
        x = torch.empty(tokens, 32, device="tpu")
        with torch.no_grad():
            assert ops_of(experts_forward, experts, x, *routed) == FUSED
        assert ops_of(experts_forward, experts, x, *routed) == PRODUCTS  # its weights ask for a gradient
        layer = [torch.empty(size, device="tpu") for size in ((tokens, 32), (4, 32, 32), (4, 32, 16))]
        assert ops_of(moe_experts, *layer, *routed) == FUSED
        assert ops_of(moe_experts, *(part.half() for part in layer), *routed) == PRODUCTS
        for format in ("int8", "fp8-block", "int4-g32"):
            (gate_up, gate_up_scale), (down, down_scale) = quantized(32, 32, format), quantized(16, 32, format)
            scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale, "transposed": True}
            call = functools.partial(moe_experts, **scales)
            assert ops_of(call, x, gate_up, down, *routed) == FUSED
            assert ops_of(call, x.half(), gate_up, down, *routed) == QUANTIZED_PRODUCTS
            assert ops_of(call, x.detach().requires_grad_(), gate_up, down, *routed) == QUANTIZED_PRODUCTS
            sizes = torch.empty(4, dtype=torch.int32, device="tpu")  # torch goes back on real devices only: its product
            assert _product(x, gate_up, gate_up_scale, sizes, 32, True).shape == x.shape
print("moe_experts on tpu: ok")
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
    assert "moe_experts on tpu: ok" in ran.stdout, ran.stderr[-3000:]
