"""The public function: checks, gradient, and which code runs.

On a TPU the Pallas kernels run. Elsewhere rms_norm is a few torch operations, written here so that autograd, vmap,
torch.compile and torch.export see through them; calling them directly costs less than going through an op. The ops
take over whenever a path is forced or recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._bridge import Lazy, jax_op
from ._bridge.paths import requested
from ._bridge.state import state

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_HAS_FUSED = hasattr(torch, "_fused_rms_norm")


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None = 1e-6,
    *,
    zero_centered: bool = False,
    float32_scale: bool = False,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Divide each row of `x` by its root mean square, then multiply by `weight`.

    The Llama order rounds to x.dtype before it multiplies by `weight`. The others multiply in float32 and round
    once: by 1 + weight with `zero_centered` (Gemma 1 to 3), by weight with `float32_scale` (Gemma 4, torch.nn.RMSNorm).
    With `residual`, x + residual is normalised and returned too: y, x + residual. `weight` None multiplies by nothing;
    `eps` None is float32's machine epsilon whatever x.dtype is: what torch.nn.RMSNorm does on a CPU.

    Shapes   x (..., n), weight (n,), residual (..., n)  ->  y (..., n), with residual also x + residual (..., n)
    Dtypes   float32, bfloat16, float16; statistics in float32; y in x.dtype, in the Llama order in the dtype that
             x and weight promote to
    Grads    x, weight and residual, first order on a TPU
    Raises   ValueError: weight is not (n,), residual is not shaped like x, devices differ.
             TypeError: a dtype outside the list, residual and x of two dtypes.
    Source   Zhang & Sennrich 2019, arXiv:1910.07467; eps inside the root, as torch.nn.RMSNorm
    """
    float32_scale = float32_scale or zero_centered
    try:
        on_tpu = not x.is_cpu and x.device.type == "tpu"  # is_cpu costs a sixth of device.type
    except AttributeError:
        _check_tensor("x", x)
        raise
    if residual is None and not on_tpu and _direct():
        # torch notices two devices itself, and looking first would cost a CPU 2 % of a short call.
        try:
            return _normalize(x, weight, eps, zero_centered, float32_scale)
        except (AttributeError, RuntimeError):
            _check(x, weight)
            raise
    _check(x, weight)
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    if residual is not None:
        _check_residual(x, residual)
        if not on_tpu and _direct():
            total = x + residual
            return _normalize(total, weight, eps, zero_centered, float32_scale), total
    if weight is None:
        weight, zero_centered, float32_scale = x.new_ones(x.shape[-1]), False, False
    if residual is None:
        return rms_norm_op(x, weight, eps, zero_centered, float32_scale)
    return rms_norm_residual_op(x, residual, weight, eps, zero_centered, float32_scale)


@torch.compiler.assume_constant_result
def _direct() -> bool:
    """Whether plain torch operations run without an op around them. torch.compile asks once, when it traces."""
    return not state.recorders and requested()[0] == "auto"


def _normalize(x: Tensor, weight: Tensor | None, eps: float | None, zero_centered: bool, float32_scale: bool) -> Tensor:
    if x.dtype not in DTYPES or not x.dim():
        _check(x, weight)
    if weight is None:
        return _rms_norm(x, x.shape[-1:], None, eps)
    # Comparing shapes would cost 0.7 us, a twentieth of one row of 2048.
    if weight.dim() != 1 or weight.size(0) != x.size(-1) or weight.dtype not in DTYPES:
        _check(x, weight)
    n = weight.shape
    if not float32_scale:
        return _rms_norm(x, n, None, eps) * weight
    if weight.dtype is x.dtype and not zero_centered:
        return _rms_norm(x, n, weight, eps)
    if zero_centered and x.dtype is torch.float32:
        return _rms_norm(x, n, 1.0 + weight.float(), eps)
    unit = _rms_norm(x.float(), n, None, torch.finfo(torch.float32).eps if eps is None else eps)
    if zero_centered:
        # unit + unit * weight is one operation less; its error of a float32 ulp is lost when it is rounded.
        return torch.addcmul(unit, unit, weight.float()).to(x.dtype)
    return (unit * weight.float()).to(x.dtype)


def _rms_norm(x: Tensor, shape: torch.Size, weight: Tensor | None, eps: float | None) -> Tensor:
    # Underneath torch.rms_norm is an op that checks no shapes (ours were) and costs a CPU 1 us less of 11
    # (torch 2.13, one row of 2048). Compilers and other versions of torch know torch.rms_norm.
    if _HAS_FUSED and not torch.compiler.is_compiling():
        return torch._fused_rms_norm(x, shape, weight, eps)[0]
    return torch.rms_norm(x, shape, weight, eps)


def _forward_torch(x: Tensor, weight: Tensor, eps: float, zero_centered: bool, float32_scale: bool) -> Tensor:
    return _normalize(x, weight, eps, zero_centered, float32_scale)


def _residual_forward_torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool, float32_scale: bool
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _normalize(total, weight, eps, zero_centered, float32_scale), total


def _backward_torch(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, zero_centered: bool, float32_scale: bool
) -> tuple[Tensor, Tensor]:
    """With r = 1 / rms(x) and g = dy * scale:  dx = r * g - x * r**3 * mean(g * x),  dweight = sum of dy * x * r."""
    scale = weight.float() + 1.0 if zero_centered else weight.float()
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit, dy = wide * inverse_rms, dy.float()
    g = dy * scale
    dx = (g - unit * (g * unit).mean(-1, keepdim=True)) * inverse_rms
    dweight = (dy * unit).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _residual_backward_torch(
    total: Tensor, weight: Tensor, dy: Tensor, dtotal: Tensor, eps: float, zero_centered: bool, float32_scale: bool
) -> tuple[Tensor, Tensor]:
    dx, dweight = _backward_torch(total.float(), weight, dy, eps, zero_centered, float32_scale)
    return (dx + dtotal).to(total.dtype), dweight


rms_norm_op = jax_op(
    "rms_norm",
    namespace=__package__,
    fn=Lazy(".kernel:rms_norm_forward", __package__),
    torch_fn=_forward_torch,
    shape_fn=Lazy(".reference:rms_norm", __package__),
)
rms_norm_residual_op = jax_op(
    "rms_norm_residual",
    namespace=__package__,
    fn=Lazy(".kernel:rms_norm_residual_forward", __package__),
    torch_fn=_residual_forward_torch,
    shape_fn=Lazy(".reference:rms_norm_residual", __package__),
)
rms_norm_backward_op = jax_op(
    "rms_norm_backward",
    namespace=__package__,
    fn=Lazy(".kernel:rms_norm_backward", __package__),
    torch_fn=_backward_torch,
    shape_fn=Lazy(".reference:rms_norm_backward", __package__),
)
rms_norm_residual_backward_op = jax_op(
    "rms_norm_residual_backward",
    namespace=__package__,
    fn=Lazy(".kernel:rms_norm_residual_backward", __package__),
    torch_fn=_residual_backward_torch,
    shape_fn=Lazy(".reference:rms_norm_residual_backward", __package__),
)


def _backward(saved, needs, dy):
    return rms_norm_backward_op(saved.x, saved.weight, dy, saved.eps, saved.zero_centered, saved.float32_scale)


def _residual_backward(saved, needs, dy, dtotal):
    dx, dweight = rms_norm_residual_backward_op(
        saved.outputs[1], saved.weight, dy, dtotal, saved.eps, saved.zero_centered, saved.float32_scale
    )
    return dx, dx, dweight


rms_norm_op.set_backward(_backward, save=("x", "weight"))
rms_norm_residual_op.set_backward(_residual_backward, save=("weight", "outputs[1]"))


def _check(x: Tensor, weight: Tensor | None) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor is not None:
            _check_tensor(name, tensor)
        if tensor is not None and tensor.dtype not in DTYPES:
            raise TypeError(
                f"rms_norm: {name} is {_short(tensor.dtype)}; supported: float32, bfloat16, float16. "
                f"Try {name}.to(torch.float32)."
            )
    if x.dim() == 0:
        raise ValueError("rms_norm: x must be (..., n) with at least one axis; got a scalar. Try x.reshape(1).")
    if weight is None:
        return
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must be (n,) = ({x.shape[-1]},) to match x (..., n) = {tuple(x.shape)}; "
            f"got {tuple(weight.shape)}. Only the last axis is normalised."
        )
    if weight.device != x.device:
        raise ValueError(
            f"rms_norm: x and weight must be on one device; got x on {x.device}, weight on {weight.device}. "
            f"Try weight.to(x.device)."
        )


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"rms_norm: {name} must be a tensor; got {type(value).__name__}. Try torch.tensor({name}).")


def _check_residual(x: Tensor, residual: Tensor) -> None:
    _check_tensor("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"rms_norm: residual must be shaped like x (..., n) = {tuple(x.shape)}; got {tuple(residual.shape)}. "
            f"Try residual.expand_as(x)."
        )
    if residual.dtype != x.dtype:
        raise TypeError(
            f"rms_norm: residual must have x.dtype = {_short(x.dtype)}; got {_short(residual.dtype)}. "
            f"Try residual.to(x.dtype)."
        )
    if residual.device != x.device:
        raise ValueError(
            f"rms_norm: x and residual must be on one device; got x on {x.device}, residual on {residual.device}. "
            f"Try residual.to(x.device)."
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
