"""experts_implementation="pallas": there before a model is built, in whatever order things are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layers_fakes import experts_kernel, norm_kernel
from layers_models import ids, tiny

import pallas_hub
from pallas_hub.layers import use_loader


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


FOLDER = str(Path(__file__).parent)
TABLE = "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as table; print('pallas' in table)"


@pytest.mark.parametrize(
    "imports",
    [
        "import pallas_hub; from transformers import Qwen3MoeForCausalLM",
        "import transformers.integrations.moe, pallas_hub",
    ],
)
def test_the_name_is_there_in_whatever_order_things_are_imported(imports):
    assert run(f"{imports}; {TABLE}") == "True"


def test_importing_pallas_hub_imports_neither_torch_nor_transformers():
    code = "import sys, pallas_hub; print([m for m in ('torch', 'transformers', 'jax', 'kernels') if m in sys.modules])"
    assert run(code) == "[]"


def test_waiting_costs_nothing_and_ends_with_the_import():
    code = """
import sys, pallas_hub.layers.interface as interface
interface.register_when_imported(); interface.register_when_imported()
waiting = lambda: sum(getattr(finder, "name", "") == "transformers.integrations.moe" for finder in sys.meta_path)
print(waiting())
import transformers.integrations.moe as moe
print(waiting(), "pallas" in moe.ALL_EXPERTS_FUNCTIONS, moe.__spec__.loader.get_source(moe.__name__)[:1])
first = moe.ALL_EXPERTS_FUNCTIONS["pallas"]
interface.register_when_imported(); interface.register()
print(waiting(), moe.ALL_EXPERTS_FUNCTIONS["pallas"] is first)
"""
    assert run(code).splitlines() == ["1", "0 True #", "0 True"]


@pytest.fixture
def kernel(fresh_pallas):
    """A fake kernel behind "pallas"."""
    kernel, loads = experts_kernel(), []

    def loader(repo_id, version):
        loads.append(repo_id)
        return kernel

    kernel.loads = loads
    with use_loader(loader):
        yield kernel


def test_a_model_built_with_the_name_runs_the_kernel(kernel):
    plain, model = tiny("qwen3_moe"), tiny("qwen3_moe", experts_implementation="pallas")
    assert model.config._experts_implementation == "pallas"
    assert kernel.loads == []  # nothing is downloaded by building a model
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, plain(ids()).logits, rtol=1e-4, atol=1e-5)
    assert kernel.loads == ["pallas-hub/moe-experts"]
    assert len(kernel.calls) == 2
    assert plain.config._experts_implementation == "grouped_mm"


def test_from_pretrained_and_the_setter_know_the_name(kernel, tmp_path):
    tiny("mixtral").save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="pallas")
    with torch.no_grad():
        wanted = model(ids()).logits
        assert len(kernel.calls) == 2
        model.set_experts_implementation("eager")
        torch.testing.assert_close(model(ids()).logits, wanted, rtol=1e-4, atol=1e-5)
        assert len(kernel.calls) == 2
        model.set_experts_implementation("pallas")
        model(ids())
    assert len(kernel.calls) == 4


def test_the_first_call_may_be_a_compiled_one(kernel):
    model = tiny("qwen3_moe", experts_implementation="pallas")
    block, x = model.model.layers[0].mlp, torch.randn(1, 5, 32)
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, backend="eager")(x)
        assert kernel.loads == ["pallas-hub/moe-experts"]
        torch.testing.assert_close(compiled, block(x))


def test_kernelize_keeps_a_model_that_has_the_name_already(kernel):
    model = tiny("qwen3_moe", experts_implementation="pallas")
    report = pallas_hub.kernelize(model, kernels=["experts"])
    assert len(report.swapped) == 2
    assert model.config._experts_implementation == "pallas"
    pallas_hub.unkernelize(model)
    assert model.config._experts_implementation == "pallas"


def test_explain_tells_the_kernel_that_the_setting_alone_runs(kernel):
    model = tiny("qwen3_moe", experts_implementation="pallas")
    row = pallas_hub.explain(model)["model.layers.0.mlp.experts"]
    assert str(row).endswith("Qwen3MoeExperts  pallas-hub/moe-experts:experts_forward, loads at its first call")
    assert kernel.loads == []
    with torch.no_grad():
        model(ids())
    report = pallas_hub.explain(model)
    assert len(report.swapped) == 2
    assert str(report["model.layers.0.mlp.experts"]).endswith("pallas-hub/moe-experts:experts_forward, runs None")
    model.set_experts_implementation("eager")
    assert pallas_hub.explain(model)["model.layers.0.mlp.experts"].reason == "kernelize was not called"


def test_verify_compares_with_the_code_of_transformers_not_with_the_kernel_itself(fresh_pallas):
    wrong = experts_kernel()
    right = wrong.experts_forward
    wrong.experts_forward = lambda self, x, *routing: right(self, x, *routing) + (len(x) > 5)  # a few tokens are right
    with use_loader(lambda repo_id, version: wrong):
        model = tiny("qwen3_moe", experts_implementation="pallas")
        with pytest.raises(pallas_hub.layers.VerificationError, match=r"kernelize: 2 of 2 swapped layers differ"):
            pallas_hub.kernelize(model, kernels=["experts"], verify=True)


def test_verify_passes_over_experts_that_kernelize_was_told_to_leave_alone(kernel):
    model = tiny("qwen3_moe", experts_implementation="pallas")
    report = pallas_hub.kernelize(model, kernels={"RMSNorm": norm_kernel(), "experts": None}, verify=True)
    assert report["model.layers.0.input_layernorm"].max_rel_error is not None
    assert report["model.layers.0.mlp.experts"].max_rel_error is None


def test_another_kernel_gets_a_name_of_its_own(kernel):
    other, model, plain = experts_kernel(), tiny("qwen3_moe"), tiny("qwen3_moe", experts_implementation="pallas")
    with use_loader(lambda repo_id, version: other):
        pallas_hub.kernelize(model, kernels={"RMSNorm": None, "experts": "acme/experts@2"})
    assert model.config._experts_implementation == "pallas:acme/experts@2"
    with torch.no_grad():
        plain(ids())
    assert len(kernel.calls) == 2
    calls = len(other.calls)
    with torch.no_grad():
        model(ids())
    assert (len(kernel.calls), len(other.calls)) == (2, calls + 2)


def test_without_a_hub_the_bundled_kernels_serve(fresh_pallas, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tiny("qwen3_moe")
    with torch.no_grad():
        before = model(ids()).logits
        report = pallas_hub.kernelize(model, verify=True)
        torch.testing.assert_close(model(ids()).logits, before, rtol=1e-4, atol=1e-5)
    assert {(layer.kernel, layer.version, layer.source) for layer in report.swapped} == {
        ("pallas-hub/rms-norm", 1, "bundled"),
        ("pallas-hub/moe-experts", 1, "bundled"),
    }
    assert model.config._experts_implementation == "pallas"


def test_the_bundled_kernel_may_be_loaded_while_a_graph_is_traced():
    code = """
import torch, pallas_hub
from layers_models import ids, tiny
plain, model = tiny("mixtral"), tiny("mixtral", experts_implementation="pallas")
with torch.no_grad():
    compiled = torch.compile(model, fullgraph=True, backend="eager")(ids()).logits
    torch.testing.assert_close(compiled, plain(ids()).logits, rtol=1e-4, atol=1e-5)
print(torch.compiler.is_compiling())
"""
    assert run(f"import sys; sys.path.insert(0, {FOLDER!r})\n{code}") == "False"
