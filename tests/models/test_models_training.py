"""Compiled, with activation checkpointing, under autocast, and with slots that no expert here serves.

On models that differ in structure. Which they are is found, not typed: one for each way in which experts are written.
"""

from __future__ import annotations

import pytest
import torch
from built_models import Built, build, run, under, words
from default_kernels import experts_forward, kernel, products
from moe_models import cases
from precision import assert_same_in_float32, layer_results
from structures import one_of_each_structure


@pytest.fixture(scope="module", params=one_of_each_structure(cases()), ids=str)
def kind(request, kernels_from_source, one_thread) -> Built:
    return build(request.param)


def test_structures_are_told_apart():
    found = {str(case) for case in one_of_each_structure(cases())}
    assert {"aria", "gpt_oss", "muse_spark", "nemotron_h", "openai_privacy_filter"} <= found
    assert len(found) < 15


def test_activation_checkpointing(kind):
    wanted, model = kind.run("eager"), kind.model.train()
    model.gradient_checkpointing_enable()
    try:
        with under(model, "setting"):
            came = run(model, words(2, 9))
    finally:
        model.gradient_checkpointing_disable()
    assert_same_in_float32(came, wanted)
    assert len(products(came.ran)) == 2 * len(wanted.routing)
    assert len(came.routing) == 2 * len(wanted.routing)  # each layer ran again for its backward


def test_autocast_trains(kind):
    with under(kind.model.train(), "setting"), torch.autocast("cpu", torch.bfloat16):
        came = run(kind.model, words(2, 9))
    assert len(products(came.ran)) == 2 * len(came.routing) > 0
    # The weights are float32 and so are their gradients; values are compared in test_models_precision.py.
    assert {gradient.dtype for gradient in came.gradients.values()} == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in came.gradients.values())


def test_experts_compile_to_one_graph_and_train(kind):
    experts = kind.experts[-1]
    inputs = _routed(experts, tokens=7)
    wanted = layer_results(experts_forward, experts, inputs)
    torch.compiler.reset()  # or the structures before this one count as recompilations
    compiled = torch.compile(kernel.experts_forward, fullgraph=True, backend="aot_eager")
    came = layer_results(compiled, experts, inputs)
    for name, value in wanted.items():
        torch.testing.assert_close(came[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_slot_that_no_expert_here_serves_counts_for_nothing(kind):
    """Expert parallelism marks it by index == num_experts. It is as if it were not there."""
    experts = kind.experts[-1]
    hidden_states, index, weights = _routed(experts, tokens=7)
    unserved = torch.zeros_like(index, dtype=torch.bool)
    unserved[0], unserved[1, 0], unserved[5, 1] = True, True, True
    eager = type(experts).forward.__wrapped__  # not every model's own loop knows the mark: there, a weight of zero
    wanted = layer_results(eager, experts, (hidden_states, index, weights.masked_fill(unserved, 0.0)))
    wanted["top_k_weights"] = wanted["top_k_weights"].masked_fill(unserved, 0.0)

    marked = index.masked_fill(unserved, experts.num_experts)
    came = layer_results(experts_forward, experts, (hidden_states, marked, weights))
    for name, value in wanted.items():
        assert (came[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
    assert not came["result"][0].any()
    assert not came["hidden_states"][0].any()
    assert not came["top_k_weights"][unserved].any()


def _routed(experts, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    _, rows, columns = experts.down_proj.shape
    hidden_states = torch.randn(tokens, columns if experts.is_transposed else rows, generator=generator)
    weights, index = torch.rand(tokens, experts.num_experts, generator=generator).topk(2)
    return hidden_states, index, weights


# Where eager itself is one graph, so is the whole model with "pallas". Eager experts loop over data, so "eager" here
# is Transformers' default, grouped_mm.
WHOLE = ("mixtral", "gpt_oss", "nemotron_h")


@pytest.mark.parametrize("case", [case for case in cases() if str(case) in WHOLE], ids=str)
def test_a_model_compiles_to_one_graph_where_transformers_own_does(case):
    built, ids = build(case), words(2, 9)
    model = built.model.eval()
    for implementation in ("grouped_mm", "pallas"):
        model.set_experts_implementation(implementation)
        torch.compiler.reset()
        with torch.no_grad():
            wanted = model(input_ids=ids, use_cache=False).logits
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            came = compiled(input_ids=ids, use_cache=False).logits
        assert (came - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    torch.compiler.reset()
