"""What the public functions accept, and the words in which they refuse the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .intervals import Window

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AUTOCAST = FLOATS[:3]  # what autocast takes; like torch's own, it leaves float64 alone
INTS = (torch.int32, torch.int64)


def is_regular(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these CPU tensors pass check_qkv for sure. It costs a few microseconds less, a tenth of a short call."""
    try:
        (b, _, hq, d), (bk, lk, hk, dk), (bv, lv, hv, _) = q.shape, k.shape, v.shape
        dtype = q.dtype
        return (
            b == bk == bv
            and d == dk
            and lk == lv
            and 0 < hk == hv
            and hq % hk == 0
            and dtype is k.dtype is v.dtype
            and dtype in FLOATS
            and q.is_cpu
            and k.is_cpu
            and v.is_cpu
        )
    except (AttributeError, ValueError):
        return False


def check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str], paged: bool = False) -> None:
    """q (b, lq, hq, d), k (b, lk, hk, d), v (b, lk, hk, dv), or all three without b; a paged k, v has pages first."""
    tensors = dict(zip(names, (q, k, v), strict=True))
    check_tensors(op, tensors)
    q_name, k_name, v_name = names
    packed = q.dim() == 3
    letters = {q_name: "total_q, hq, d" if packed else "b, lq, hq, d"}
    letters[k_name] = "pages, page, hk, d" if paged else "total_k, hk, d" if packed else "b, lk, hk, d"
    letters[v_name] = letters[k_name] + "v"
    for name, tensor in tensors.items():
        if tensor.dim() != letters[name].count(",") + 1:
            raise ValueError(f"{op}: {name} must be ({letters[name]}); got {shape_text(tensor)}.")
    _check_match(op, k_name, "d", "d", q.shape[-1], k, -1, q_name, q)
    _check_match(op, v_name, "hk", "hk", k.shape[-2], v, -2, k_name, k)
    for axis in range(k.dim() - 2):
        _check_match(op, v_name, "lk", letters[k_name].split(", ")[axis], k.shape[axis], v, axis, k_name, k)
    if not (packed or paged):
        _check_match(op, k_name, "b", "b", q.shape[0], k, 0, q_name, q)
    check_heads(op, q.shape[-2], k.shape[-2], q_name, k_name)
    check_floats(op, tensors)


def _check_match(op: str, name: str, short: str, letter: str, wanted: int, x: Tensor, axis: int, other: str, y: Tensor):
    if x.shape[axis] != wanted:
        raise ValueError(
            f"{op}: {name} must have {letter} = {wanted} like {other} {shape_text(y)}; got {shape_text(x)}."
        )


def check_heads(op: str, hq: int, hk: int, q_name: str, k_name: str) -> None:
    if hk == 0 and hq == 0:
        return
    if hk == 0 or hq % hk:
        raise ValueError(
            f"{op}: hq must be a multiple of hk, so that each head of {k_name} serves as many heads of {q_name}; "
            f"got hq = {hq}, hk = {hk}."
        )


def check_tensors(op: str, tensors: Mapping[str, object]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor; got {type(tensor).__name__}. Try torch.tensor({name}).")
    check_one_device(op, tensors)


def check_one_device(op: str, tensors: Mapping[str, Any]) -> None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if len({tensor.device for tensor in given.values()}) > 1:
        each = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(f"{op}: all tensors must be on one device; got {each}. Try .to({next(iter(given))}.device).")


def check_floats(op: str, tensors: dict[str, Tensor]) -> None:
    """All of one supported dtype; under autocast, which makes them so, of supported dtypes but not float64."""
    (first, lead), *others = tensors.items()
    supported = FLOATS if autocast_dtype(lead) is None else AUTOCAST
    for name, tensor in tensors.items():
        if tensor.dtype not in supported:
            listed = ", ".join(map(_name, supported))
            raise TypeError(
                f"{op}: {name} is {_name(tensor.dtype)}; supported: {listed}. Try {name}.to(torch.float32)."
            )
    if supported is AUTOCAST:
        return
    for name, tensor in others:
        if tensor.dtype != lead.dtype:
            raise TypeError(
                f"{op}: {name} must have the dtype of {first}, {_name(lead.dtype)}; got {_name(tensor.dtype)}. "
                f"Try {name}.to({first}.dtype)."
            )


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast, where it is on, makes of this tensor."""
    device = tensor.device.type
    if tensor.dtype not in AUTOCAST or not torch.amp.is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def check_whole_numbers(op: str, name: str, tensor: object, letters: str, size: int | None) -> Tensor:
    """A tensor (size,) of whole numbers; any size if None."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor; got {type(tensor).__name__}. Try torch.tensor({name}).")
    if tensor.dtype not in INTS:
        raise TypeError(f"{op}: {name} is {_name(tensor.dtype)}; supported: int32, int64. Try {name}.to(torch.int32).")
    if tensor.dim() != 1 or (size is not None and tensor.shape[0] != size):
        numbers = "" if size is None else f" = ({size},)"
        raise ValueError(f"{op}: {name} must be ({letters},){numbers}; got {shape_text(tensor)}.")
    return tensor


def check_cu_seqlens(op: str, name: str, tensor: object, total: int, total_name: str, sequences: int | None) -> None:
    """(n + 1,) running sums of lengths, from 0 to at most total. Values are looked at where that is free."""
    cu = check_whole_numbers(op, name, tensor, "n + 1", None if sequences is None else sequences + 1)
    if not cu.shape[0]:
        raise ValueError(f"{op}: {name} must be (n + 1,), starting with 0; got (0,).")
    if not can_read_values(cu):
        return
    values = cu.tolist()
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            raise ValueError(
                f"{op}: {name} must not decrease; got {name}[{i}] = {values[i]} after {values[i - 1]}. "
                f"If these are lengths, sum them up: torch.cumsum."
            )
    if values[0] or values[-1] > total:
        came = f"{name}[0] = {values[0]}" if values[0] else f"{name}[-1] = {values[-1]}"
        raise ValueError(f"{op}: {name} must go from 0 to at most {total_name} = {total}; got {came}.")


def check_dropout(op: str, dropout_p: float) -> None:
    if dropout_p:
        raise ValueError(
            f"{op}: dropout_p must be 0, since no path drops attention weights; got {dropout_p}. "
            f"Set the model's attention_dropout to 0, or call .eval()."
        )


def check_softcap(op: str, softcap: float | None) -> float:
    """0 or None is off."""
    if softcap is None or (isinstance(softcap, int | float) and softcap == 0):
        return 0.0
    if not isinstance(softcap, int | float) or not 0 < softcap < math.inf:
        raise ValueError(f"{op}: softcap must be above 0 and finite, or 0 or None for none; got {softcap}.")
    return float(softcap)


def check_window(op: str, window_size: object, causal: bool) -> Window:
    """flash-attn's (left, right), -1 for no limit; a causal window ends on the diagonal."""
    if window_size == (-1, -1):
        return None, 0 if causal else None
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ValueError(f"{op}: window_size must be (left, right), -1 for no limit; got {window_size}.")
    for size in window_size:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | torch.SymInt) or size < -1):
            raise ValueError(
                f"{op}: window_size must be (left, right), each a count of keys beside the row's own, or -1 for no "
                f"limit; got {tuple(window_size)}."
            )
    left, right = (None if size is None or size == -1 else size for size in window_size)
    return left, 0 if causal else right


def check_slopes(op: str, slopes: Tensor | None, q: Tensor, b: int | None) -> None:
    """(hq,) or, where batch entries exist, (b, hq)."""
    if slopes is None:
        return
    check_tensors(op, {"q": q, "alibi_slopes": slopes})
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: alibi_slopes must not require a gradient, which no path has; got one that does. "
            f"Try alibi_slopes.detach()."
        )
    hq = q.shape[-2]
    fitting = [(hq,)] if b is None else [(hq,), (b, hq)]
    if tuple(slopes.shape) not in fitting:
        letters = "(hq,)" if b is None else "(hq,) or (b, hq)"
        numbers = " or ".join(f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})" for shape in fitting)
        raise ValueError(f"{op}: alibi_slopes must be {letters} = {numbers}; got {shape_text(slopes)}.")


def check_sinks(op: str, sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    check_tensors(op, {"q": q, "s_aux": sinks})
    if tuple(sinks.shape) != (q.shape[-2],):
        raise ValueError(f"{op}: s_aux must be (hq,) = ({q.shape[-2]},), a sink per head; got {shape_text(sinks)}.")


def check_segment_ids(op: str, ids: object, q: Tensor, k: Tensor) -> Tensor:
    b, length = q.shape[:2]
    if k.shape[1] != length:
        raise ValueError(
            f"{op}: segment_ids needs lq = lk, one id for a row and its key; got lq = {length}, lk = {k.shape[1]}."
        )
    if not isinstance(ids, Tensor) or ids.is_floating_point() or tuple(ids.shape) != (b, length):
        came = f"{_name(ids.dtype)} {shape_text(ids)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{op}: segment_ids must be whole numbers (b, l) = ({b}, {length}); got {came}.")
    if can_read_values(ids):
        for entry in ids.tolist():
            runs = [x for i, x in enumerate(entry) if i == 0 or entry[i - 1] != x]
            if len(set(runs)) < len(runs):
                twice = next(x for x in runs if runs.count(x) > 1)
                raise ValueError(
                    f"{op}: segment_ids must keep each segment in one run; got {twice} in two places. "
                    f"Sort the rows by segment."
                )
    return ids


def check_padding(op: str, mask: object, k: Tensor) -> Tensor:
    b, lk = k.shape[:2]
    if not isinstance(mask, Tensor) or mask.is_floating_point() or tuple(mask.shape) != (b, lk):
        came = f"{_name(mask.dtype)} {shape_text(mask)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"{op}: key_padding_mask must be bool or whole numbers (b, lk) = ({b}, {lk}), true for real keys; "
            f"got {came}."
        )
    return mask.bool()


def can_read_values(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing and breaks nothing: a plain CPU tensor, and no tracing or vmap."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def shape_text(tensor: Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"({sizes},)" if tensor.dim() == 1 else f"({sizes})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
