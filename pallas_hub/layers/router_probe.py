"""Find the rule that a router follows: run its forward on random tokens, and every rule beside it."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pallas_hub.layers.router_rules import (
    ONE_OVER_TOP_K,
    PRODUCTS,
    TOP_K,
    Route,
    Router,
    first_of,
    has_weight,
    logits_of,
    run,
    weight_of,
)

_SCALES = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
_BIASES = ("e_score_correction_bias", "moe_statics.e_score_correction_bias")
_EPSILONS: tuple[float | str, ...] = ("norm_topk_prob_eps", 0.0, 1e-20, 1e-6)
_SCORES = ("softmax", "sigmoid", "topk_softmax")
_FUNCTIONS = ("score_fn", "scoring_function")  # attributes that score logits
_DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))


@dataclass(frozen=True)
class _Run:
    """One call of the original."""

    twin: Any
    inputs: tuple[Tensor, ...]
    wanted: Any  # or what it raised, in words
    flattens: bool
    problem: str | None = None


def find(module: Any) -> Router | str:
    """The rule, or why there is none. It has to hold in all dtypes; of several, the one with the same last bits."""
    originals = originals_of(module)
    if isinstance(originals, str):
        return originals
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        left: list[Router] | None = None
        for original in originals:
            rules = _candidates(module, originals) if left is None else left
            left = [rule for rule in rules if agrees(rule, plain_route, original)]
            if not left:
                dtypes = " and ".join(_dtype(part) for part in (original.inputs[0], *original.twin.parameters()))
                return f"its forward computes something else than any rule of router_topk, in {dtypes}"
        assert left is not None
        best = min(left, key=lambda rule: sum(_bits_that_differ(rule, original) for original in originals))
    return replace(best, flattens=all(original.flattens for original in originals))


def originals_of(module: Any) -> list[_Run] | str:
    """What the class's own forward gives, in each of the dtypes that it takes."""
    found = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for dtype, of_tokens in _DTYPES:
            original = _run_original(_twin(module, dtype), of_tokens)
            if isinstance(original.wanted, str):
                if dtype != of_tokens:
                    continue  # it takes tokens of its own dtype only
                return f"its forward fails on plain tokens: {original.wanted}"
            if original.problem is not None:
                return original.problem
            if not _is_a_routers(original.wanted):
                return "its forward returns something else than logits, weights and index of the chosen"
            found.append(original)
    return found


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _run_original(twin: Any, dtype: torch.dtype) -> _Run:
    tokens, *bias = _inputs(twin, dtype)
    buffers = {name: buffer.clone() for name, buffer in twin.named_buffers()}
    wanted, of_batch = _original(twin, tokens, *bias), _original(twin, tokens[None], *bias)
    takes_batches_only = isinstance(wanted, str)
    if takes_batches_only:
        wanted, of_batch = of_batch, wanted
    in_training = _original(twin.train(), tokens[None] if takes_batches_only else tokens, *bias)
    problem = None
    if not isinstance(wanted, str) and not _same(in_training, wanted):
        problem = "its forward computes something else in training"
    elif any(not torch.equal(buffer, buffers[name]) for name, buffer in twin.named_buffers()):
        problem = "its forward changes its buffers"
    return _Run(twin.eval(), (tokens, *bias), wanted, takes_batches_only or _same(of_batch, wanted), problem)


def _is_a_routers(result: Any) -> bool:
    if not isinstance(result, tuple) or len(result) != 3 or not all(isinstance(part, Tensor) for part in result):
        return False
    logits, weights, index = result
    return index.dtype == torch.int64 and index.dim() == 2 == logits.dim() and weights.shape == index.shape


def _original(twin: Any, *inputs: Tensor) -> Any:
    """What the class's own forward returns, or what it raises, in words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return type(twin).forward(twin, *(part.clone() for part in inputs))
    except Exception as error:  # whatever it is, this forward is not that of a router
        return f"{type(error).__name__}: {re.split(chr(10), str(error), maxsplit=1)[0][:120]}"


def _same(came: Any, wanted: Any) -> bool:
    if not isinstance(came, tuple) or not isinstance(wanted, tuple) or len(came) != len(wanted):
        return False
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(came, wanted, strict=True)
    )


def _twin(module: Any, dtype: torch.dtype) -> Any:
    """A copy with random weights, on the CPU: with such that tell the rules apart."""
    twin = copy.deepcopy(module).to("cpu")
    twin.__dict__.pop("forward", None)
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.device("cpu"):
        for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
            if not tensor.is_floating_point():
                continue
            drawn = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 2 and min(tensor.shape) > 1:
                # All rows share a direction, by which _inputs moves all logits of a token up and down.
                drawn = drawn * tensor.shape[1] ** -0.5 + _direction(tensor.shape[1])
            elif "bias" not in name and "correction" not in name:
                drawn = 1 + 0.1 * drawn
            tensor.data = (0.3 * drawn if "bias" in name else drawn).to(dtype)
    return twin.eval()


def _direction(width: int) -> Tensor:
    with torch.device("cpu"):
        return torch.full((width,), width**-0.5)


def _inputs(twin: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tokens (t, h): large and small logits, and such that all are far below or above zero."""
    name = next(name for name in PRODUCTS if has_weight(twin, name))
    experts, width = weight_of(twin, name).shape
    generator = torch.Generator(device="cpu").manual_seed(1)
    with torch.device("cpu"):
        x = torch.randn(96, width, generator=generator)
        size = torch.tensor([1.0, 1.0, 4.0, 0.05]).repeat(24)[:, None]
        shift = torch.tensor([0.0, 0.0, 0.0, -7.0, -14.0, -42.0, -70.0, 5.0]).repeat_interleave(12)[:, None]
        tokens = (x * size + shift * _direction(width)).to(dtype)
        bias = 0.3 * torch.randn(experts, generator=generator)
    second = [name for name in inspect.signature(type(twin).forward).parameters if name != "self"][1:]
    return (tokens, bias) if second else (tokens,)


def _candidates(module: Any, originals: list[_Run]) -> Iterator[Router]:
    """All rules that this module might follow, as far as its attributes, its logits and dtypes tell."""
    top_k = first_of(module, TOP_K)
    assert top_k is not None  # _unfit has looked
    biases = [name for name in _BIASES if first_of(module, (name,))] + [""] * (len(originals[0].inputs) - 1) + [None]
    scale = first_of(module, _SCALES)
    scales = [scale, 1.0] if scale else [1.0, ONE_OVER_TOP_K]
    limits: list[tuple] = [(None, 2)]
    if first_of(module, ("num_group",)) and first_of(module, ("topk_group",)) and module.num_group > 1:
        limits += [(("num_group", "topk_group"), 2), (("num_group", "topk_group"), 1)]
    divisions: list[tuple] = [(True, 0.0, "norm_min")] * hasattr(module, "norm_min") + [(False, 0.0, None)]
    divisions += [
        (True, epsilon, None) for epsilon in _EPSILONS if not isinstance(epsilon, str) or hasattr(module, epsilon)
    ]
    ways = [(score, "all") for score in _SCORES]
    ways += [(name, "scores") for name in _FUNCTIONS if callable(getattr(module, name, None))]
    ways += [("sigmoid", "chosen"), ("sigmoid", "scores"), ("softmax", "scores")]
    for head in _heads(module, top_k):
        if not all(_same_logits(head, original) for original in originals):
            continue
        for (score, does), division, bias, factor, limit in itertools.product(ways, divisions, biases, scales, limits):
            renormalize, epsilon, floor = division
            if score == "topk_softmax" and renormalize:
                continue
            yield replace(
                head,
                score=score,
                does=does,
                renormalize=renormalize,
                epsilon=epsilon,
                floor=floor,
                scale=factor,
                bias=bias,
                groups=limit[0],
                best_of_group=limit[1],
            )


def _heads(module: Any, top_k: str) -> Iterator[Router]:
    """What comes before the choice, and the dtypes."""
    prepared = all(hasattr(module, name) for name in ("norm", "scale", "scalar_root_size"))
    expert_scale = "per_expert_scale" if hasattr(module, "per_expert_scale") else None
    for product, wide, logits, weights in itertools.product(
        [name for name in PRODUCTS if has_weight(module, name)],
        (False, True),
        ("probabilities",) if expert_scale else ("product", "float32"),
        ("logits", "tokens", "float32"),
    ):
        yield Router(
            product,
            wide,
            logits,
            weights,
            top_k,
            score="",
            multiplier="output_multiplier" if hasattr(module, "output_multiplier") else None,
            prepared=prepared,
            expert_scale=expert_scale,
        )


def _same_logits(head: Router, original: _Run) -> bool:
    """Whether logits are those of the original, and weights will come in the original's dtype."""
    try:
        logits = logits_of(head, original.twin, original.inputs[0])
    except RuntimeError:
        return False
    if head.logits == "float32":
        logits = logits.float()
    elif head.logits == "probabilities":
        logits = logits.softmax(dim=-1, dtype=torch.float32)
    dtype = {"tokens": original.inputs[0].dtype, "logits": logits.dtype, "float32": torch.float32}[head.weights]
    wanted = original.wanted[0]
    if (logits.dtype, logits.shape, dtype) != (wanted.dtype, wanted.shape, original.wanted[1].dtype):
        return False
    return torch.allclose(logits, wanted) if wanted.dtype == torch.float32 else torch.equal(logits, wanted)


def agrees(router: Router, route: Route, original: _Run) -> bool:
    try:
        came = run(router, route, original.twin, *original.inputs)
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return False
    wanted = original.wanted
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in zip(came, wanted, strict=True)):
        return False
    weights = [part[1].sort(dim=-1).values.float() for part in (came, wanted)]
    # One unit of the dtype; float32 sums may be taken in another order.
    rtol = 1e-5 if wanted[1].dtype == torch.float32 else torch.finfo(wanted[1].dtype).eps
    return torch.allclose(*weights, rtol=rtol, atol=1e-37) and _same_choice(came, wanted)


def _bits_that_differ(router: Router, original: _Run) -> int:
    """Softmax of the chosen and softmax of all, divided by the sum of the chosen, differ in last bits only."""
    came = run(router, plain_route, original.twin, *original.inputs)
    (one, one_index), (other, other_index) = (_in_order(part) for part in (came, original.wanted))
    return int((one != other).sum()) + int((one_index != other_index).sum())


def _same_choice(came: Any, wanted: Any) -> bool:
    """The same experts with the same weights; except where another one has the very same score."""
    (one, one_index), (other, other_index) = (_in_order(part) for part in (came, wanted))
    differs = (one_index != other_index).any(dim=-1)
    if not torch.allclose(one[~differs].float(), other[~differs].float(), rtol=1e-2, atol=1e-37):
        return False
    logits = [part[0].float().gather(1, part[2]).sort(dim=-1).values for part in (came, wanted)]
    return torch.equal(logits[0][differs], logits[1][differs])


def _in_order(part: Any) -> tuple[Tensor, Tensor]:
    index, order = part[2].sort(dim=-1)
    return part[1].gather(1, order), index


def plain_route(
    logits: Tensor,
    *,
    top_k: int,
    score: str,
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 2,
) -> tuple[Tensor, Tensor]:
    """What router_topk means, in a few lines of torch."""
    wide = logits.float()
    scores = {"softmax": wide.softmax(-1), "sigmoid": wide.sigmoid(), "topk_softmax": wide}[score]
    choice = scores if bias is None else scores + bias
    if top_groups < groups:
        by_group = choice.unflatten(-1, (groups, -1))
        best = by_group.topk(min(best_of_group, by_group.shape[-1]), dim=-1).values.sum(-1)
        dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, best.topk(top_groups, dim=-1).indices, False)
        choice = by_group.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    index = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, index)
    if score == "topk_softmax":
        weights = weights.softmax(-1)
    elif renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    return (weights * scale).to(logits.dtype), index
