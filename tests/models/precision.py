"""How far results are from the exact ones, and how far they may be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import torch
from built_models import Built, Run, inputs_of, routing_of, run, under, words
from torch import Tensor, nn

EPS32 = torch.finfo(torch.float32).eps


def assert_same_in_float32(came: Run, wanted: Run) -> None:
    """To 1e-5 of each tensor's largest value, as asked for.

    Below one float32 epsilon of the model's largest gradient lies what backpropagation itself cannot resolve: there
    the difference is rounding, and a gradient that is zero on paper is nothing else.
    """
    assert _distance(came.logits, wanted.logits) <= 1e-5 * wanted.logits.abs().max()
    assert _distance(came.loss, wanted.loss) <= 1e-5 * wanted.loss.abs()
    assert came.gradients.keys() == wanted.gradients.keys()
    resolved = EPS32 * max(gradient.abs().max() for gradient in wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        assert _distance(came.gradients[name], gradient) <= max(1e-5 * gradient.abs().max(), resolved), name


def _distance(a: Tensor, b: Tensor) -> Tensor:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return (a - b).abs().max()


def error(came: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, relative to that of the exact values."""
    return ((came.double() - exact.double()).norm() / exact.double().norm()).item()


def gradient_error(came: Run, exact: Run) -> float:
    """Root mean square over all parameters that have a gradient to speak of."""
    largest = max(gradient.abs().max() for gradient in exact.gradients.values())
    errors = [
        error(came.gradients[name], gradient)
        for name, gradient in exact.gradients.items()
        if gradient.abs().max() > 1e-6 * largest
    ]
    return (sum(value**2 for value in errors) / len(errors)) ** 0.5


def narrow_and_exact(built: Built) -> tuple[Any, Any]:
    """The model in bfloat16, and one in float64 with the same weights."""
    narrow = copy.deepcopy(built.model).to(torch.bfloat16).eval()
    exact = copy.deepcopy(narrow).double()
    exact.set_experts_implementation("eager")
    return narrow, exact


def words_routed_alike(narrow: Any, exact: Any) -> Generator[Tensor]:
    """Words that go to the same experts in bfloat16 and in float64. Otherwise two different sums are compared."""
    for seed in range(200):
        ids = words(1, 6, seed)
        wanted = _routing(exact, ids)
        if all(_routing_is(_routing(narrow, ids, way), wanted) for way in ("eager", "setting")):
            yield ids


def _routing(model: Any, ids: Tensor, way: str = "eager") -> list[Tensor]:
    torch.manual_seed(0)
    with under(model, way), torch.no_grad(), routing_of(model) as calls:
        model(**inputs_of(model, ids))
    return [index for _, index in calls]


def _routing_is(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.sort(-1).values, b.sort(-1).values) for a, b in zip(one, other, strict=True))


def run_under(model: Any, ids: Tensor, way: str) -> Run:
    with under(model, way):
        return run(model, ids)


def inputs_of_last_experts(model: Any, ids: Tensor) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """The last experts that the model calls, and what it hands them: hidden states, top_k_index, top_k_weights."""
    calls: list[tuple[Any, tuple]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: calls.append((module, args)))
        for module in {module for module, _ in _calls(model, ids)}
    ]
    with under(model, "eager"), torch.no_grad():
        model(**inputs_of(model, ids))
    for hook in hooks:
        hook.remove()
    return calls[-1]


def _calls(model: Any, ids: Tensor) -> list[tuple[nn.Module, Tensor]]:
    with under(model, "eager"), torch.no_grad(), routing_of(model) as calls:
        model(**inputs_of(model, ids))
    return calls


def layer_errors(forward: Callable, experts: Any, inputs: tuple, *, autocast: bool = False) -> dict[str, float]:
    """Error of `forward` and of its gradients against the experts' own code in float64, by name."""
    eager = type(experts).forward.__wrapped__
    exact = layer_results(eager, copy.deepcopy(experts).double(), tuple(_wide(value) for value in inputs))
    came = layer_results(forward, experts, inputs, autocast=autocast)
    return {name: error(came[name], exact[name]) for name in exact}


def layer_results(forward: Callable, experts: Any, inputs: tuple, *, autocast: bool = False) -> dict[str, Tensor]:
    hidden_states, index, weights = (value.detach().clone() for value in inputs)
    parameters = dict(experts.named_parameters())
    leaves = {"hidden_states": hidden_states.requires_grad_(), "top_k_weights": weights.requires_grad_(), **parameters}
    upstream = torch.randn(hidden_states.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = forward(experts, hidden_states, index, weights)
    gradients = torch.autograd.grad(result, tuple(leaves.values()), upstream.to(result.dtype))
    return {"result": result.detach(), **dict(zip(leaves, gradients, strict=True))}


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
