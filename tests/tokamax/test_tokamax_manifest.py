"""docs/tokamax.md, followed to the letter; another op of Tokamax; and what a manifest may not say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokamax")
import kernels

from pallas_hub.registry import get_kernel, load_source, loaded_from
from pallas_hub.registry.build import build
from pallas_hub.registry.errors import SourceError
from pallas_hub.registry.paths import OUR_SOURCES, Sources
from pallas_hub.registry.publish import publish
from pallas_hub.registry.record import record
from pallas_hub.registry.server import running_hub
from pallas_hub.registry.source import read_source

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "tokamax.md").read_text()
FILES = dict(re.findall(r"^`(kernels/[^`]+)`\n\n```toml\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE))
NAME = "tokamax-layer-norm"

GATED = """
[ops.glu]
calls = "gated_linear_unit"
tensors = { x = "(m, k)", weights = "(k, 2, n)" }
fixed = "activation=jax.nn.silu"
result = "(m, n)"
tpu = ["mosaic", "xla"]
cpu = ["xla"]
"""


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Sources:
    """The two files of the document, and nothing else."""
    monkeypatch.setenv("PALLAS_HUB_CACHE", str(tmp_path / "builds"))
    assert len(FILES) == 2, sorted(FILES)
    for path, text in FILES.items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        # A comment of its own makes each test's build, and so its module and ops, its own.
        place.write_text(text.replace('summary = "', f'summary = "{tmp_path.name}: '))
    return Sources(tmp_path / "kernels", tmp_path / "manifests", OUR_SOURCES.bridge)


def edit(shelf: Sources, text: str) -> None:
    (shelf.kernels / NAME / "tokamax.toml").write_text(text)


def test_built_served_and_loaded_by_both_loaders(shelf, tmp_path, monkeypatch):
    from huggingface_hub import constants

    record(NAME, shelf)
    with running_hub(tmp_path / "store", trusted=["pallas-hub"]) as hub:
        for name, value in {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hf"), "HF_HUB_OFFLINE": False}.items():
            monkeypatch.setattr(constants, name, value)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "any")
        publish(NAME, sources=shelf)
        kernel = get_kernel("pallas-hub/tokamax-layer-norm", version=1, sources=shelf)
        assert loaded_from(kernel).source == "hub"
        theirs = kernels.get_kernel("pallas-hub/tokamax-layer-norm", version=1, trust_remote_code=True)
    assert theirs is kernel

    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    with kernel._bridge.record_paths() as ran:
        y = kernel.layer_norm(x, weight, epsilon=1e-5)
        grads = torch.autograd.grad(y.square().sum(), (x, weight))
    assert [(op.rpartition("::")[2], path) for op, path in ran] == [
        ("layer_norm_cpu", "jax"),
        ("layer_norm_cpu_backward", "jax"),
    ]
    wanted = torch.nn.functional.layer_norm(x, (8,), weight, None, 1e-5)
    torch.testing.assert_close(y, wanted)
    for one, other in zip(grads, torch.autograd.grad(wanted.square().sum(), (x, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    layer = kernel.layers.RMSNorm()
    layer.weight, layer.variance_epsilon = weight, 1e-6
    torch.testing.assert_close(layer(x), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    errors = re.findall(r"^(ValueError|TypeError): (.*)$", DOC, re.MULTILINE)
    calls = [(torch.randn(4, 8), torch.ones(4)), (torch.randn(4, 8).double(), torch.ones(8))]
    for (error, message), given in zip(errors, calls, strict=True):
        with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[error], match=re.escape(message)):
            kernel.layer_norm(*given)


def test_a_call_with_a_fixed_argument_and_another_name(shelf, tmp_path):
    edit(shelf, f"# {tmp_path}\n" + GATED.replace("[ops.glu]", f'[ops.glu]\nsummary = "{tmp_path.name}"'))
    kernel = load_source(NAME, sources=shelf)
    torch.manual_seed(0)
    x, weights = torch.randn(5, 4, requires_grad=True), torch.randn(4, 2, 3, requires_grad=True)
    y = kernel.glu(x, weights)
    wanted = torch.nn.functional.silu(x @ weights[:, 0]) * (x @ weights[:, 1])
    torch.testing.assert_close(y, wanted)
    upstream = torch.randn_like(y)
    for one, other in zip(*(torch.autograd.grad(z, (x, weights), upstream) for z in (y, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"glu: weights must be \(k, 2, n\) = \(4, 2, n\); got \(4, 3, 3\)\."):
        kernel.glu(x, torch.ones(4, 3, 3))


def test_the_same_manifest_gives_the_same_build(shelf, tmp_path):
    first, second = (build(NAME, tmp_path / place, sources=shelf) for place in ("one", "two"))
    assert first.digests == second.digests
    assert set(first.api.names) == {"layer_norm", "layers"}
    assert first.api.layers["RMSNorm"]["forward"] == "(self, hidden_states) -> Tensor"
    names = {path.name for path in (tmp_path / "one" / "build" / "torch-cpu").iterdir()}
    assert {"_bridge", "_tokamax.py", "kernel.py", "op.py", "layers.py", "__init__.py", "metadata.json"} == names


def test_op_of_tokamax_ragged_dot_is_what_its_manifest_gives(tmp_path):
    source = read_source("tokamax-ragged-dot")
    shelf = Sources(tmp_path / "kernels", tmp_path / "manifests", OUR_SOURCES.bridge)
    for name in ("tokamax-ragged-dot", "ragged-dot"):
        folder = OUR_SOURCES.folder(name)
        shutil.copytree(folder, shelf.kernels / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    op = shelf.package("tokamax-ragged-dot") / "op.py"
    op.unlink()
    assert read_source("tokamax-ragged-dot", shelf).files["op.py"] == source.files["op.py"]
    op.write_text(source.files["op.py"].decode() + "\n")
    with pytest.raises(SourceError, match=r"tokamax-ragged-dot: op\.py is not what tokamax\.toml gives\. Remove it"):
        read_source("tokamax-ragged-dot", shelf)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[ops.layer_norm]", "[op.layer_norm]", r"must hold \[ops\.NAME\] tables and, if wanted, \[layers\.NAME\]"),
        ("result", "results", r"\[ops\.layer_norm\] must hold cpu, result, tensors, tpu and may hold calls, fixed"),
        ('x = "(..., n)"', 'x = "n"', r'tensors\.x must be like "\(m, k\)", .*; got \'n\'\.'),
        ('x = "(..., n)"', 'x = "(n, ...)"', r"tensors\.x must be like"),
        ('result = "(..., n)"', 'result = "(q,)"', r'result must be like .* with the sizes of tensors: \.\.\., n; got'),
        ('result = "(..., n)"', 'result = "(n,) like y"', r"result is like 'y', which is no tensor of this op\."),
        ('tpu = ["xla"]', 'tpu = "xla"', r'tpu must list implementations, as in \["mosaic", "xla"\]\.'),
        ("epsilon = 1e-6", "epsilon = [1]", r"options\.epsilon must be a number, true, false or a text; got \[1\]"),
        ("epsilon = 1e-6", "lambda = 1e-6", r"'lambda' is not a Python name\."),
        ('result = "(..., n)"', 'result = "(..., n)"\nfixed = "axis=="', r"ops\.layer_norm\.fixed is not Python: "),
        ('forward = "hidden_states"\n', "", r'\[layers\.RMSNorm\] must hold forward = "hidden_states" and returns'),
        ("layer_norm(hidden_states", "norm(hidden_states", r"RMSNorm\.returns calls none of the ops: layer_norm"),
        ('x = "(..., n)"', 'x = "(..., n) or None"', r"tensors\.x is the first, and can't be left out\."),
        ('{ x = "(..., n)", scale = "(n,) or None", offset = "(n,) or None" }', "{}", r"tables, the first not empty"),
        ("[ops.layer_norm]", "[ops.layer_norm", r"not valid TOML"),
    ],
)  # fmt: skip
def test_a_manifest_may_not_say(shelf, old, new, message):
    text = (shelf.kernels / NAME / "tokamax.toml").read_text()
    assert old in text
    edit(shelf, text.replace(old, new))
    with pytest.raises(SourceError, match=message):
        read_source(NAME, shelf)
