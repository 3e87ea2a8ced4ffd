"""libtpu compiles every kernel for every TPU generation: compiled, not run. And torch_tpu takes the ops."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("libtpu", reason="skipped: needs libtpu, the TPU compiler")
jnp = jax.numpy

from pallas_hub.bench.tpu_compile import TARGETS, compile_for_tpu  # noqa: E402

EPS = 1e-6
SHAPES = [
    *(
        (m, n, "bfloat16")
        for m, n in ((1, 1), (13, 129), (1, 2048), (64, 2048), (4096, 4096), (40, 65536), (9, 262144))
    ),
    *((m, n, "float32") for m, n in ((7, 100), (8, 2048), (20, 512), (8, 200001))),
]
DTYPES = ["bfloat16", "float32"]


def launches(part, m, n, dtype, weight_dtype=None, **order):
    kernel = part("kernel")
    x = jax.ShapeDtypeStruct((m, n), dtype)
    weight = jax.ShapeDtypeStruct((n,), weight_dtype or dtype)
    y = jax.eval_shape(lambda x, w: kernel.rms_norm_forward(x, w, eps=EPS, **order), x, weight)
    return {
        "rms_norm_forward": (x, weight),
        "rms_norm_residual_forward": (x, x, weight),
        "rms_norm_backward": (x, weight, y),
        "rms_norm_residual_backward": (x, weight, y, x),
    }


def compile_all(part, target, *args, **order):
    for name, operands in launches(part, *args, **order).items():
        compiled = compile_for_tpu(getattr(part("kernel"), name), *operands, target=target, eps=EPS, **order)
        assert "tpu_custom_call" in compiled.as_text(), f"{name} holds no Pallas kernel"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("m", "n", "dtype"), SHAPES)
def test_compiles(part, target, m, n, dtype):
    compile_all(part, target, m, n, dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", [{"zero_centered": True}, {"float32_scale": True}], ids=lambda o: next(iter(o)))
def test_compiles_in_every_order(part, target, order):
    compile_all(part, target, 24, 640, "bfloat16", **order)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "float16"), ("float32", "bfloat16")], ids=str)
def test_compiles_mixed_dtypes_and_float16(part, target, dtypes):
    compile_all(part, target, 24, 640, *dtypes)


@pytest.mark.parametrize("size", [1, 7, 8, 100, 128, 129])
def test_lowers_at_sizes_around_a_tile(part, size):
    for m, n in ((size, 128), (16, size)):
        for dtype in DTYPES:
            for name, operands in launches(part, m, n, dtype).items():
                kernel = getattr(part("kernel"), name)
                exported = jax.export.export(jax.jit(lambda *a, k=kernel: k(*a, eps=EPS)), platforms=("tpu",))
                assert "tpu_custom_call" in exported(*operands).mlir_module()


TPU_SCRIPT = """
    import sys
    sys.path.insert(0, {torch_ext!r})
    import torch
    import torch_tpu._loader
    torch_tpu._loader._init_device("tpu")
    from torch._subclasses.fake_tensor import FakeTensorMode
    import importlib
    rms_norm = importlib.import_module({name!r})
    op = importlib.import_module({name!r} + ".op")
    with FakeTensorMode():
        x = torch.empty(24, 256, device="tpu", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(256, device="tpu", dtype=torch.bfloat16, requires_grad=True)
        assert op.rms_norm_op.path_for(x) == "pallas"
        y = rms_norm.rms_norm(x, weight)
        assert y.device.type == "tpu" and y.shape == x.shape and y.dtype == x.dtype
        y, total = rms_norm.rms_norm(x, weight, residual=x)
        x, weight, y = x.detach(), weight.detach(), y.detach()
        dx, dweight = op.rms_norm_backward_op(x, weight, y, 1e-6, False, False)
        assert dx.shape == x.shape and dweight.shape == weight.shape and dweight.device.type == "tpu"
        for name in ("rms_norm", "rms_norm_residual", "rms_norm_backward", "rms_norm_residual_backward"):
            tpu_op = getattr(op, name + "_op").tpu_op
            flags = (1e-6, False, False)
            arguments = {{
                "rms_norm": (x, weight), "rms_norm_residual": (x, x, weight),
                "rms_norm_backward": (x, weight, y), "rms_norm_residual_backward": (x, weight, y, x),
            }}[name]
            out = tpu_op(*arguments, *flags)
            out = out[0] if isinstance(out, (tuple, list)) else out
            assert out.shape == x.shape, name
    print("fake tpu ok")
"""


def test_torch_tpu_takes_the_ops(rms_norm_kernel):
    """Fake tensors only: torch_tpu lowers the kernel for its shape rule; nothing is run."""
    pytest.importorskip("torch_tpu", reason="skipped: needs torch_tpu")

    script = textwrap.dedent(TPU_SCRIPT).format(
        torch_ext=str(Path(rms_norm_kernel.__file__).parents[1]), name=rms_norm_kernel.__name__
    )
    environment = {
        **os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }  # fmt: skip
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert "fake tpu ok" in ran.stdout, ran.stderr[-3000:]
