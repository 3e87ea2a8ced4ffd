"""The public router: checks, gradient, and which code runs.

As in the other kernels, on CPU and CUDA this is a few torch operations that autograd, vmap and torch.compile see
through. The op takes over on a TPU, and whenever a path is forced or recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._bridge import Lazy, jax_op
from ._bridge.paths import requested
from ._bridge.state import state

SCORES = ("softmax", "sigmoid", "topk_softmax")
DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
TINY = 1e-20  # as in router_reference.py, which needs JAX
BEST_OF_GROUP = (2, 1)


def router_topk(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 2,
    epsilon: float = TINY,
) -> tuple[Tensor, Tensor]:
    """Choose the top_k experts of each token, best first, and weight them by their scores.

    score        "softmax" over all experts, "sigmoid", or "topk_softmax": choose by logits, softmax over the chosen
    renormalize  divide the chosen weights by their sum plus epsilon; "topk_softmax" sums to one already
    scale        multiplies the weights, after that
    bias         is added to the scores to choose by, not to the weights, and gets no gradient
    groups       experts come in so many groups of equal size, of which a token uses the top_groups whose
                 best_of_group best experts, two or one, have the largest sum
    Of equal scores a kernel takes the lowest index, torch (on CPU and CUDA) any. NaN counts as the largest score, and
    a softmax over a NaN is NaN in all weights; the index is a valid one. Logits of -inf are never chosen before others.

    Shapes   logits (t, e), bias (e,)  ->  weights (t, top_k), index (t, top_k)
    Dtypes   float32, bfloat16, float16, float64 (not on TPU); scores in float32 (float64 for float64); weights in
             logits.dtype, index int64. For float32 weights pass logits.float()
    Grads    logits, of any order
    Raises   ValueError: shapes that do not match, top_k, groups or top_groups out of range, an unknown score.
             TypeError: unsupported dtypes
    Source   the routers of Transformers; groups and bias as in DeepSeek-V3, arXiv:2412.19437
    """
    # One test for all that is usual: words are looked for only when it fails.
    if (
        not isinstance(logits, Tensor)
        or logits.dim() != 2
        or logits.dtype not in DTYPES
        or score not in SCORES
        or bias is not None
        or groups != 1
        or top_groups != 1
        or best_of_group not in BEST_OF_GROUP
        or type(top_k) is not int
        or not 1 <= top_k <= logits.shape[1]
    ):
        _check(logits, top_k, score, bias, groups, top_groups, best_of_group)
    if runs_as_torch(logits):
        return route(logits, bias, top_k, score, renormalize, scale, groups, top_groups, best_of_group, epsilon)
    numbers = float(scale), groups, top_groups, best_of_group, float(epsilon)
    weights, index = router_topk_op(logits, bias, top_k, score, renormalize, *numbers)
    return weights, index.long()


def runs_as_torch(logits: Tensor) -> bool:
    """Whether a call with such logits is a few torch operations and no op: on CPU and CUDA, unless told otherwise."""
    return _direct() and (logits.is_cpu or logits.device.type != "tpu")


def _direct() -> bool:
    """Whether plain torch operations run without an op around them. torch.compile asks once, when it traces."""
    return not state.recorders and requested()[0] == "auto"


# torch.compiler.assume_constant_result without its import of the compiler, which takes a second.
_direct._dynamo_marked_constant = True  # type: ignore[attr-defined]


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    renormalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    best_of_group: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    if score == "softmax":
        scores = torch.softmax(logits, dim=-1, dtype=dtype)
    elif score == "sigmoid":
        scores = torch.sigmoid(logits if logits.dtype is dtype else logits.to(dtype))
    else:  # chosen as they are: they have the same order
        scores = logits if bias is None else logits.to(dtype)
    choice = scores if bias is None else scores + bias
    if top_groups < groups:
        choice = _limit_groups(choice, groups, top_groups, best_of_group)
    chosen, index = torch.topk(choice, top_k, dim=-1)
    weights = chosen if choice is scores else scores.gather(1, index)
    if score == "topk_softmax":
        # In float32 inside for every dtype; rounded here only where nothing follows.
        weights = torch.softmax(weights, dim=-1, dtype=logits.dtype if scale == 1.0 else dtype)
    elif renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        # The largest probabilities add up to more than any rounding of TINY; others may not.
        sure = epsilon == 0.0 or (epsilon <= TINY and score == "softmax" and choice is scores)
        weights = weights / (total if sure else total + epsilon)
    if scale != 1.0:
        weights = weights * scale
    return weights if weights.dtype is logits.dtype else weights.to(logits.dtype), index


def _limit_groups(choice: Tensor, groups: int, top_groups: int, best_of_group: int) -> Tensor:
    by_group = choice.reshape(choice.shape[0], groups, choice.shape[1] // groups)
    best = by_group.topk(min(best_of_group, by_group.shape[2]), dim=-1)[0].sum(dim=-1)  # (t, groups)
    kept = best.topk(top_groups, dim=-1)[1]
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    return by_group.masked_fill(dropped.unsqueeze(2), float("-inf")).reshape(choice.shape)


def _forward_torch(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    renormalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    best_of_group: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    weights, index = route(logits, bias, top_k, score, renormalize, scale, groups, top_groups, best_of_group, epsilon)
    return weights, index.int()


router_topk_op = jax_op(
    "router_topk",
    namespace=__package__,
    fn=Lazy(".router_kernel:router_topk_forward", __package__),
    torch_fn=_forward_torch,
    shape_fn=Lazy(".shapes:router_topk", __package__),
)


def _backward(saved: Any, needs: Any, dweights: Tensor, dindex: Any) -> tuple[Tensor | None, None]:
    """The index is given: what is left is smooth in the logits, and goes back through torch's own operations.

    With the weights w = scale * s / sum of s, or scale * s:
        softmax over the chosen      dlogits = w * (dw - sum of w * dw / scale) at the chosen
        softmax over all             dlogits = s * (g - sum of s * g), g = dw * scale at the chosen, else 0
        sigmoid                      dlogits = ds * s * (1 - s) at the chosen
    """
    logits, index = saved.logits, saved.outputs[1].long()
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    g = dweights.to(wide) * saved.scale
    if saved.score == "sigmoid":
        s = logits.gather(1, index).to(wide).sigmoid()
        if saved.renormalize:
            total = s.sum(dim=1, keepdim=True) + saved.epsilon
            g = (g - (g * s).sum(dim=1, keepdim=True) / total) / total
        dchosen = g * s * (1 - s)
    elif saved.score == "softmax" and (not saved.renormalize or saved.epsilon > TINY):
        s = torch.softmax(logits, dim=1, dtype=wide)
        if saved.renormalize:
            chosen = s.gather(1, index)
            total = chosen.sum(dim=1, keepdim=True) + saved.epsilon
            g = (g - (g * chosen).sum(dim=1, keepdim=True) / total) / total
        g = torch.zeros_like(s).scatter(1, index, g)
        return (s * (g - (s * g).sum(dim=1, keepdim=True))).to(logits.dtype), None
    else:  # probabilities that are divided by their sum are a softmax over the chosen
        s = torch.softmax(logits.gather(1, index), dim=1, dtype=wide)
        dchosen = s * (g - (s * g).sum(dim=1, keepdim=True))
    return torch.zeros_like(logits).scatter(1, index, dchosen.to(logits.dtype)), None


router_topk_op.set_backward(_backward, save=("logits", "outputs[1]"))


def _check(logits: Any, top_k: Any, score: Any, bias: Any, groups: Any, top_groups: Any, best_of_group: Any) -> None:
    for name, tensor in (("logits", logits), ("bias", bias)):
        if tensor is not None or name == "logits":
            _check_tensor(name, tensor)
    if logits.dim() != 2:
        raise ValueError(
            f"router_topk: logits must be (t, e), tokens by experts; got {tuple(logits.shape)}. "
            f"Try logits.reshape(-1, logits.shape[-1])."
        )
    e = logits.shape[1]
    if score not in SCORES:
        raise ValueError(f'router_topk: score must be one of {", ".join(SCORES)}; got "{score}".')
    for name, value in (("top_k", top_k), ("groups", groups), ("top_groups", top_groups)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise TypeError(f"router_topk: {name} must be an int; got {type(value).__name__}.")
    if not 1 <= top_k <= e:
        raise ValueError(f"router_topk: top_k must be 1 ... e = 1 ... {e} for logits (t, e); got {top_k}.")
    if groups < 1 or e % groups:
        raise ValueError(f"router_topk: groups must divide e = {e} for logits (t, e); got {groups}.")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"router_topk: top_groups must be 1 ... groups = 1 ... {groups}; got {top_groups}.")
    if best_of_group not in BEST_OF_GROUP:
        raise ValueError(f"router_topk: best_of_group must be 2 or 1; got {best_of_group}.")
    if top_k > top_groups * (e // groups):
        raise ValueError(
            f"router_topk: top_k must be at most top_groups * e / groups = {top_groups * (e // groups)}, the experts "
            f"that a token may use; got {top_k}."
        )
    if bias is not None and tuple(bias.shape) != (e,):
        raise ValueError(
            f"router_topk: bias must be (e,) = ({e},) to match logits (t, e) = {tuple(logits.shape)}; "
            f"got {tuple(bias.shape)}."
        )
    if bias is not None and bias.device != logits.device:
        raise ValueError(
            f"router_topk: logits and bias must be on one device; got logits on {logits.device}, bias on "
            f"{bias.device}. Try bias.to(logits.device)."
        )


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"router_topk: {name} must be a tensor; got {type(value).__name__}. Try torch.tensor({name}).")
    if value.dtype not in DTYPES:
        raise TypeError(
            f"router_topk: {name} is {str(value.dtype).removeprefix('torch.')}; supported: float32, bfloat16, float16, "
            f"float64. Try {name}.float()."
        )
