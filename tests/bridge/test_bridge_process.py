"""What can only be seen in a process of its own: imports, forks, first calls, a missing JAX, a TPU device."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRELUDE = """
import sys
import torch
from torch import Tensor
from pallas_hub.torch_bridge import Lazy, jax_op, record_paths, use_path

sys.path.insert(0, "tests/bridge")
"""


def run(code: str, *, prelude: str = PRELUDE, expect: int = 0, **environment: str) -> str:
    """Output of `code` in a fresh interpreter, all of it."""
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    output = done.stdout + done.stderr
    assert done.returncode == expect, output
    return output


def test_importing_and_declaring_loads_no_jax():
    run(
        """
        def torch_fn(x: Tensor, factor: float = 2.0) -> Tensor:
            return x * factor

        op = jax_op("scale", namespace="n", fn=Lazy("not_there.kernel:scale"), torch_fn=torch_fn)
        x = torch.ones(3, requires_grad=True)
        op.set_backward(lambda saved, needs, grad: op(grad, saved.factor))
        op(x, 3.0).sum().backward()
        assert x.grad.tolist() == [3, 3, 3]
        assert not {name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib")}
        """
    )


def test_declaring_jax_ops_starts_no_backend():
    run(
        """
        import bridge_ops
        from jax._src import xla_bridge
        assert not xla_bridge._backends
        bridge_ops.scale(torch.ones(3, 4), 2.0)  # the torch path
        assert not xla_bridge._backends
        """
    )


def test_a_missing_jax_is_named_with_the_op_and_the_mend():
    output = run(
        """
        sys.modules["jax"] = None  # as if it were not installed

        def torch_fn(x: Tensor) -> Tensor:
            return x * 2

        op = jax_op("double", namespace="n", fn=Lazy("bridge_ops:_scale_pallas"), torch_fn=torch_fn)
        assert op(torch.ones(2)).tolist() == [2, 2]
        for call in (lambda: use_path("interpret"), lambda: torch._subclasses.FakeTensorMode()):
            with call() as mode:
                x = torch.ones(2)
                try:
                    op(x)
                except ImportError as error:
                    print(error, error.name)
        """
    )
    message = "double: this path runs JAX code, and JAX can't be imported"
    assert output.count(message) == 2
    assert output.count("Install it: pip install jax") == 2


def test_another_import_error_is_not_taken_for_a_missing_jax():
    output = run(
        """
        def torch_fn(x: Tensor) -> Tensor: ...
        op = jax_op("double", namespace="n", fn=Lazy("not_there.kernel:double"), torch_fn=torch_fn)
        with use_path("interpret"):
            op(torch.ones(2))
        """,
        expect=1,
    )
    assert "No module named 'not_there'" in output
    assert "pip install jax" not in output


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_first_call_may_be_compiled(dynamic):
    run(
        f"""
        from bridge_ops import gelu, scale, linear
        f = torch.compile(
            lambda x, w: linear(scale(gelu(x), 3.0), w).sum(), fullgraph=True, dynamic={dynamic}, backend="aot_eager"
        )
        x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        f(x, w).backward()
        ours = x.grad, w.grad
        right = torch.autograd.grad(linear(scale(gelu(x), 3.0), w).sum(), (x, w))
        torch.testing.assert_close(ours, right)
        """
    )


# Forks


FORK = """
import os
from bridge_ops import gelu, scale
{before}
pid = os.fork()
if pid:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
try:
    {child}
except RuntimeError as error:
    print("RuntimeError:", error)
sys.stdout.flush()
os._exit(0)  # like a worker of multiprocessing: without JAX's own clean-up, which is not made for a fork
"""
CALL = "gelu(torch.ones(2))"
REFUSAL = "RuntimeError: gelu: JAX had started before this process was forked, and does not survive a fork"


@pytest.mark.parametrize("before", [CALL, "import jax; jax.numpy.ones(2)"], ids=["by-an-op", "by-somebody-else"])
def test_a_fork_after_jax_has_started_is_named_and_does_not_hang(before):
    output = run(FORK.format(before=before, child=CALL))
    assert REFUSAL in output
    assert 'multiprocessing_context="spawn"' in output


def test_torch_paths_work_in_a_forked_child():
    output = run(FORK.format(before=CALL, child="print(scale(torch.ones(2, 1), 2.0).tolist())"))
    assert "[[2.0], [2.0]]" in output


def test_a_fork_before_the_first_op_is_harmless():
    output = run(FORK.format(before="", child="print(gelu(torch.zeros(2)).tolist())"))
    assert "[0.0, 0.0]" in output


LOADER = """
from bridge_ops import gelu

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        x = torch.full((2,), float(i))
        return gelu(x) if {uses_op} else x

if __name__ == "__main__":
    gelu(torch.ones(2))
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context={context!r})
    print([batch.shape for batch in loader])
"""


@pytest.mark.parametrize(
    ("context", "uses_op", "works"), [("fork", False, True), ("fork", True, False), ("spawn", True, True)]
)
def test_data_loader_workers(tmp_path, context, uses_op, works):
    script = tmp_path / "loader_script.py"
    prelude = PRELUDE.replace('"tests/bridge"', repr(str(ROOT / "tests/bridge")))
    script.write_text(prelude + LOADER.format(uses_op=uses_op, context=context))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode == 0) == works, done.stdout + done.stderr
    if not works:
        assert "does not survive a fork" in done.stderr


# Copies of the bridge


def test_two_vendored_copies_share_forced_paths_and_recorders(tmp_path):
    import shutil

    for name in ("kernel_v1", "kernel_v2"):
        package = tmp_path / name
        shutil.copytree(ROOT / "torch_bridge", package / "_bridge")
        (package / "__init__.py").write_text(
            "from torch import Tensor\n"
            "from ._bridge import jax_op, record_paths, use_path\n"
            "def _f(x: Tensor) -> Tensor:\n    return x * 2\n"
            "op = jax_op('f', namespace='same_id', fn=lambda x: x * 2, torch_fn=_f)\n"
        )
    run(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import kernel_v1, kernel_v2
        assert kernel_v1.use_path is not kernel_v2.use_path
        assert (kernel_v1.op.qualname, kernel_v2.op.qualname) == ("same_id::f", "same_id_2::f")
        x = torch.ones(2)
        with kernel_v1.use_path("interpret"), record_paths() as ran:
            kernel_v1.op(x)
            kernel_v2.op(x)
        assert ran == [("same_id::f", "jax"), ("same_id_2::f", "jax")], ran
        """
    )


# TPU: a device without hardware. Only FakeTensors: a real tensor on it waits for a chip for ever.


TPU = """
import warnings
warnings.simplefilter("ignore")
import torch_tpu
from torch_tpu import _loader
_loader._init_device("tpu")
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from bridge_ops import gelu, linear, scale, split
mode = FakeTensorMode(shape_env=ShapeEnv())

def fake(*shape, dtype=torch.float32):
    with mode:
        return torch.empty(shape, dtype=dtype, device="tpu")

def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def test_tpu_fakes_and_export_of_the_kernel():
    pytest.importorskip("torch_tpu")
    run(
        TPU
        + """
x = fake(16, 128, dtype=torch.bfloat16)
assert scale.path_for(x) == "pallas"
with mode:
    y = scale(x, 3.0)
    assert (y.shape, y.dtype, y.device.type) == ((16, 128), torch.bfloat16, "tpu")
    y, index = split(fake(5, 128))
    assert (y.shape, index.shape, index.dtype) == ((11, 128), (5,), torch.int32)

    exported = []
    import jax

    # torch_tpu lowers the Pallas kernel for TPU to learn its shapes.
    callable = scale.tpu_op._init_fn
    lowered = callable.exported
    callable.exported = lambda *a, **k: exported.append(lowered(*a, **k)) or exported[-1]
    y = scale.tpu_op(x, 3.0)
    assert (y.shape, y.dtype, y.device.type) == ((16, 128), torch.bfloat16, "tpu")
    (program,) = exported
    assert program.platforms == ("tpu",)
    assert "tpu_custom_call" in program.mlir_module()

    y = linear.tpu_op(fake(5, 4), fake(4, 3), None, 1.0)
    assert y.shape == (5, 3)
assert scale.path_for(torch.ones(2, 4)) == "torch"  # the CPU is as before
assert gelu(torch.ones(2)).shape == (2,)
assert jax.config.jax_platforms == "cpu"  # the chip belongs to torch_tpu
""",
        JAX_PLATFORMS="",
    )


def test_tpu_symbolic_sizes_and_refusals():
    pytest.importorskip("torch_tpu")
    output = run(
        TPU
        + """
sized = mode.from_tensor(torch.empty(16, 128), static_shapes=False)
with mode:
    x = torch.empty(sized.shape, device="tpu")
    for y in (scale(x, 2.0), scale.tpu_op(x, 2.0)):
        assert [str(n) for n in y.shape] == [str(n) for n in x.shape], y.shape
        assert isinstance(y.shape[0], torch.SymInt)
x = fake(16, 128)
with mode:
    print(refused(lambda: linear(x, torch.empty(128, 3))))
for path in ("interpret", "jax"):
    with use_path(path):
        print(refused(lambda: scale.path_for(x)))
print(refused(lambda: scale._run_on_tpu((fake(16, 128, dtype=torch.float64),), (2.0,))))
"""
    )
    assert "ValueError: linear: all tensors must be on one device; got x on tpu:0, w on cpu." in output
    assert 'RuntimeError: scale: path "interpret" runs on cpu only; got tensors on tpu. Try .cpu().' in output
    assert 'RuntimeError: scale: path "jax" runs on cpu only; got tensors on tpu. Try .cpu().' in output
    assert "TypeError: scale: x is float64; JAX code takes float32" in output
