"""Every model with experts computes with "pallas" what it computes with Transformers' own loop over experts.

By experts_implementation="pallas" ("setting") and by pallas_hub.kernelize, in float32, where both are the same sums in
another order. What bfloat16 adds is in test_models_precision.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from built_models import NOT_GENERATING, inputs_of, run, under, words
from default_kernels import kernel, norms, products, record_paths
from moe_models import cases
from precision import assert_same_in_float32

import pallas_hub
from pallas_hub.layers.quantized_experts import QuantizedExperts

WAYS = ("setting", "kernelize")


def test_a_model_built_with_pallas_runs_the_kernel_in_every_experts_layer(built):
    assert {module.config._experts_implementation for module in built.experts} == {"pallas"}
    came = run(built.model.train(), words(2, 9))  # as it was built, without the setter
    assert any(isinstance(module, built.case.experts_class) for module, _ in came.routing)
    assert len(products(came.ran)) == len(came.ran) == 2 * len(came.routing)
    assert built.run("eager").ran == []


@pytest.mark.parametrize("way", WAYS)
def test_logits_loss_and_gradients(built, way):
    came, wanted = built.run(way), built.run("eager")
    assert len(products(came.ran)) == 2 * len(came.routing) > 0
    assert_same_in_float32(came, wanted)


def test_kernelize_takes_every_experts_layer_and_says_so(built):
    with under(built.model, "kernelize"):
        report = pallas_hub.explain(built.model)
        names = {type(module).__name__ for module in built.experts}
        rows = [row for row in report if row.original in names]
    assert len(rows) == len(built.experts)
    assert all(row.swapped and row.layer == "experts_forward" for row in rows), report
    assert bool(norms(built.run("kernelize").ran)) == any(row.swapped and row not in rows for row in report)


# One model's generate() imports torch's compiler.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_generates_the_same_32_tokens(built, way):
    if str(built.case) in NOT_GENERATING:
        pytest.skip(f"cannot generate: {NOT_GENERATING[str(built.case)]}")
    came, wanted = built.generate(way), built.generate("eager")
    assert len(products(came.ran)) == 2 * came.calls > 0
    assert wanted.ran == []
    assert came.tokens.shape[1] >= 32
    assert torch.equal(came.tokens, wanted.tokens)
    if wanted.logits is not None:
        assert (came.logits - wanted.logits).abs().max() <= 1e-5 * wanted.logits.abs().max()


def test_experts_without_tokens_get_a_gradient_of_exactly_zero(built):
    with under(built.model, "setting"):
        came = run(built.model.eval(), words(1, 2))
    assert len(products(came.ran)) == 2 * len(came.routing)
    names = {parameter: name for name, parameter in built.model.named_parameters()}
    used: dict[str, torch.Tensor] = {}  # by parameter, since an encoder may share its experts with a decoder
    for module, index in came.routing:
        for name in (names[parameter] for parameter in module.parameters() if parameter.dim() > 1):
            used.setdefault(name, torch.zeros(module.num_experts, dtype=torch.bool))[index.flatten()] = True
    used = {name: experts for name, experts in used.items() if name in came.gradients}
    assert any(not experts.all() for experts in used.values())
    for name, experts in used.items():
        gradient = came.gradients[name].flatten(1)
        assert gradient[experts].any(), name
        assert not gradient[~experts].any(), name


def test_quantised_experts_compute_with_what_their_data_stands_for(built):
    """Each model in another format, beside itself with the weights that this format can hold."""
    model, formats = copy.deepcopy(built.model).eval(), list(kernel.FORMATS)
    report = pallas_hub.quantize_experts(model, formats[cases().index(built.case) % len(formats)])
    assert len(report.quantized) == len(report) == len(built.experts), report
    floats = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            for name, part in (("gate_up_proj" if module.has_gate else "up_proj", "gate_up"), ("down_proj", "down")):
                like = built.model.get_submodule(path).get_parameter(name)
                data, scale = getattr(module, f"{part}_data"), getattr(module, f"{part}_scale")
                weight = kernel.dequantize(data, scale, like.shape[1 if module.is_transposed else 2])
                floats[f"{path}.{name}"] = weight if module.is_transposed else weight.mT.contiguous()
    inputs = inputs_of(model, words(2, 9))
    with torch.no_grad(), under(built.model.eval(), "setting"):
        torch.manual_seed(0)
        wanted = torch.func.functional_call(built.model, floats, (), inputs, tie_weights=False).logits
        torch.manual_seed(0)
        with record_paths() as ran:
            came = model(**inputs).logits
    assert [op.split("::")[1] for op, _ in ran] == ["quantized_dot"] * len(ran)
    assert ran
    assert (came - wanted).abs().max() <= 1e-5 * wanted.abs().max()
