"""What routers do, as one rule with many options: router_topk at its heart, and torch before and after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

TOP_K = ("top_k", "num_experts_per_tok", "config.top_k_experts")
PRODUCTS = ("weight", "gate", "wg", "proj")  # a parameter, or a layer
ONE_OVER_TOP_K = "1 / top_k"
Route = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Router:
    """A router that router_topk can stand in for. Words are names of attributes, read at every call."""

    product: str  # what tokens are multiplied by
    wide: bool  # the product is taken in float32
    logits: str  # what is returned first: "product", "float32" (the product made wide), "probabilities"
    weights: str  # in whose dtype weights are returned: "tokens", "logits", "float32"
    top_k: str
    score: str  # of router_topk; or what torch takes of the logits, "sigmoid" or the name of a function of the module
    # "all": router_topk does it all. "scores": torch scores, router_topk chooses. "chosen": router_topk chooses by the
    # logits, torch scores the chosen. Whatever torch does after the choice is done to (t, top_k) values only.
    does: str = "all"
    renormalize: bool = False
    epsilon: float | str = 0.0
    floor: str | None = None  # the least sum that divides, in place of an epsilon
    scale: float | str = 1.0
    bias: str | None = None  # where it is kept; "" when it is the second argument
    groups: tuple[str, str] | None = None  # names of groups and top_groups
    best_of_group: int = 2
    multiplier: str | None = None  # of the logits
    prepared: bool = False  # tokens are normalised and scaled first, as in Gemma 4
    expert_scale: str | None = None  # multiplies the weights, one for each expert
    flattens: bool = True  # takes tokens (b, s, h) as (b * s, h)


def run(router: Router, route: Route, module: Any, hidden_states: Tensor, bias: Tensor | None = None) -> Any:
    logits = logits_of(router, module, hidden_states)
    returned = logits.float() if router.logits == "float32" else logits
    dtype = {"tokens": hidden_states.dtype, "logits": returned.dtype, "float32": torch.float32}[router.weights]
    bias, scores = _bias(router, module, bias), returned
    if router.does == "all":
        outside = router.floor is not None
        # Weights come in the dtype of what they are chosen by; inside all is float32 either way.
        choice = returned if dtype == returned.dtype and not outside else returned.float()
    else:
        outside = True
        scores = returned if router.does == "chosen" else _score(router, module, returned)
        choice, bias = (scores if bias is None else scores + bias), None
    weights, index = route(choice, bias=bias, **_options(router, module, outside))
    if router.does == "scores":
        weights = scores.gather(1, index)
    elif router.does == "chosen":
        weights = _score(router, module, returned.gather(1, index))
    if outside:
        weights = _finish(router, module, weights)
    if router.expert_scale is not None:
        weights = weights * getattr(module, router.expert_scale)[index]
    weights = weights.to(dtype)
    if router.logits == "probabilities":
        returned = torch.softmax(logits, dim=-1, dtype=torch.float32)
    return returned, weights, index


def logits_of(router: Router, module: Any, hidden_states: Tensor) -> Tensor:
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if router.prepared:
        x = module.norm(x) * module.scale * module.scalar_root_size
    logits = _product(module, router.product, x, router.wide)
    return logits if router.multiplier is None else logits * value_of(module, router.multiplier)


def _score(router: Router, module: Any, logits: Tensor) -> Tensor:
    if router.score == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if router.score == "sigmoid" else getattr(module, router.score)(logits)


def _finish(router: Router, module: Any, weights: Tensor) -> Tensor:
    if router.renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        epsilon = value_of(module, router.epsilon)
        if router.floor is not None:
            total = total.clamp(min=value_of(module, router.floor))
        elif epsilon:
            total = total + epsilon
        weights = weights / total
    scale = _scale(router, module)
    return weights if scale == 1.0 else weights * scale


def has_weight(module: Any, name: str) -> bool:
    try:
        weight = weight_of(module, name)
    except AttributeError:
        return False
    return isinstance(weight, Tensor) and weight.dim() == 2


def weight_of(module: Any, name: str) -> Tensor:
    held = getattr(module, name)
    return held if isinstance(held, Tensor) else held.weight


def _product(module: Any, name: str, x: Tensor, wide: bool) -> Tensor:
    held = getattr(module, name)
    if not isinstance(held, Tensor):
        return held(x.to(held.weight.dtype))
    bias, dtype = module._parameters.get("bias"), torch.float32 if wide else held.dtype
    return functional.linear(x.to(dtype), held.to(dtype), None if bias is None else bias.to(dtype))


def _options(router: Router, module: Any, outside: bool) -> dict[str, Any]:
    score = router.score if router.does == "all" else "topk_softmax"  # which chooses by what it is given
    options: dict[str, Any] = {"top_k": value_of(module, router.top_k), "score": score}
    if not outside:
        options["scale"] = _scale(router, module)
        if score != "topk_softmax":
            options |= {"renormalize": router.renormalize, "epsilon": value_of(module, router.epsilon)}
    if router.groups is not None:
        groups, top_groups = (value_of(module, name) for name in router.groups)
        options |= {"groups": groups, "top_groups": top_groups, "best_of_group": router.best_of_group}
    return options


def _scale(router: Router, module: Any) -> float:
    if router.scale == ONE_OVER_TOP_K:
        return 1 / value_of(module, router.top_k)
    return value_of(module, router.scale)


def _bias(router: Router, module: Any, argument: Tensor | None) -> Tensor | None:
    if router.bias is None:
        return None
    bias = argument if router.bias == "" else value_of(module, router.bias)
    return None if bias is None else bias.detach().reshape(-1)


def value_of(module: Any, source: Any) -> Any:
    """A number as it is; what stands under a name, such as config.top_k_experts."""
    if not isinstance(source, str):
        return source
    for name in source.split("."):
        module = getattr(module, name)
    return module


def first_of(module: Any, names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            if value_of(module, name) is not None:
                return name
        except AttributeError:
            continue
    return None
