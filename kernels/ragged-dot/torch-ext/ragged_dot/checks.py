"""What the public functions accept, and the words in which they refuse the rest."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
AUTOCAST = FLOATS[:3]  # what autocast takes; like torch's own, it leaves float64 alone
INTS = (torch.int32, torch.int64)


def check_product(op: str, lhs: Tensor, rhs: Tensor, sizes: Tensor, names: tuple[str, str, str], letters: str) -> None:
    """lhs (m, k) times rhs (g, k, n), `letters` giving the order of rhs' axes; sizes (g,) whole numbers."""
    lhs_name, rhs_name, sizes_name = names
    check_one_device(op, {lhs_name: lhs, rhs_name: rhs, sizes_name: sizes})
    if lhs.dim() != 2:
        raise ValueError(f"{op}: {lhs_name} must be (m, k); got {shape_text(lhs)}.")
    if rhs.dim() != 3:
        raise ValueError(f"{op}: {rhs_name} must be ({letters}); got {shape_text(rhs)}.")
    k = lhs.shape[1]
    g, *inner = rhs.shape
    if inner[0 if letters == "g, k, n" else 1] != k:
        rule = f"({g}, {k}, n)" if letters == "g, k, n" else f"({g}, n, {k})"
        other = "transpose_rhs=True" if letters == "g, k, n" else "transpose_rhs=False"
        mend = f" Try {other}." if op == "ragged_dot" and k in inner else ""
        raise ValueError(
            f"{op}: {rhs_name} must be ({letters}) = {rule} to match {lhs_name} (m, k) = {shape_text(lhs)}; "
            f"got {shape_text(rhs)}.{mend}"
        )
    if sizes.dim() != 1 or sizes.shape[0] != g:
        raise ValueError(
            f"{op}: {sizes_name} must be (g,) = ({g},) to match {rhs_name} ({letters}) = {shape_text(rhs)}; "
            f"got {shape_text(sizes)}."
        )
    check_floats(op, {lhs_name: lhs, rhs_name: rhs})
    check_whole_numbers(op, sizes_name, sizes)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast, where it is on, makes of this tensor."""
    device = tensor.device.type
    if tensor.dtype not in AUTOCAST or not torch.amp.is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def check_floats(op: str, tensors: dict[str, Tensor]) -> None:
    """All of one supported dtype; under autocast, which makes them so, of supported dtypes but not float64."""
    (first, lead), *others = tensors.items()
    if lead.dtype not in FLOATS:
        raise _unsupported(op, first, lead, FLOATS)
    if autocast_dtype(lead) is not None:
        for name, tensor in others:
            if tensor.dtype not in AUTOCAST:
                raise _unsupported(op, name, tensor, AUTOCAST)
        return
    for name, tensor in others:
        if tensor.dtype != lead.dtype:
            raise TypeError(
                f"{op}: {name} must have the dtype of {first}, {dtype_text(lead)}; got {dtype_text(tensor)}. "
                f"Try {name}.to({first}.dtype)."
            )


def _unsupported(op: str, name: str, tensor: Tensor, supported: tuple[torch.dtype, ...]) -> TypeError:
    names = ", ".join(map(_name, supported))
    return TypeError(f"{op}: {name} is {dtype_text(tensor)}; supported: {names}. Try {name}.to(torch.float32).")


def check_layer(op: str, tensors: dict[str, Tensor], gated: bool, transposed: bool) -> tuple[int, int, int]:
    """hidden_states (t, h), gate_up_proj (e, 2 * i, h), down_proj (e, h, i); returns e, h and the width 2 * i.

    Without a gate the width is i. Transposed weights have their last two axes exchanged.
    """
    hidden_states, gate_up_proj, down_proj = tensors.values()
    width_letters = "2 * i" if gated else "i"
    first, second = (("h", width_letters), ("i", "h")) if transposed else ((width_letters, "h"), ("h", "i"))
    if hidden_states.dim() != 2:
        raise ValueError(f"{op}: hidden_states must be (t, h); got {shape_text(hidden_states)}. Try .flatten(0, -2).")
    h = hidden_states.shape[1]
    if gate_up_proj.dim() != 3 or gate_up_proj.shape[1 if transposed else 2] != h:
        numbers = f"(e, {', '.join(str(h) if letter == 'h' else letter for letter in first)})"
        raise ValueError(
            f"{op}: gate_up_proj must be (e, {', '.join(first)}) = {numbers} to match hidden_states (t, h) = "
            f"{shape_text(hidden_states)}; got {shape_text(gate_up_proj)}."
            f"{_try_transposed(gate_up_proj, h, 2 if transposed else 1, transposed)}"
        )
    e, width = gate_up_proj.shape[0], gate_up_proj.shape[2 if transposed else 1]
    i = down_proj.shape[1 if transposed else 2] if down_proj.dim() == 3 else -1
    if tuple(down_proj.shape) != ((e, i, h) if transposed else (e, h, i)) or width != (2 * i if gated else i):
        numbers = {"h": h, "i": f"{width} / 2" if gated else width}
        raise ValueError(
            f"{op}: down_proj must be (e, {', '.join(second)}) = ({e}, {', '.join(str(numbers[x]) for x in second)}) "
            f"to match gate_up_proj (e, {', '.join(first)}) = {shape_text(gate_up_proj)}; got {shape_text(down_proj)}."
        )
    check_floats(op, tensors)
    return e, h, width


def check_gated(op: str, gated: Tensor, rows: int, i: int, gate: object) -> None:
    """What the caller's gate or activation made of the first product. Not every path compares it with down_proj."""
    if tuple(gated.shape) != (rows, i):
        name = "gate" if callable(gate) else "activation"
        raise ValueError(f"{op}: {name} must give (s, i) = ({rows}, {i}) to match down_proj; got {shape_text(gated)}.")


def _try_transposed(weight: Tensor, h: int, axis: int, transposed: bool) -> str:
    return f" Try transposed={not transposed}." if weight.dim() == 3 and weight.shape[axis] == h else ""


def check_whole_numbers(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in INTS:
        raise TypeError(f"{op}: {name} is {dtype_text(tensor)}; supported: int32, int64. Try {name}.to(torch.int32).")


def check_one_device(op: str, tensors: dict[str, Tensor | None]) -> None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor; got {type(tensor).__name__}. Try torch.tensor({name}).")
    if len({tensor.device for tensor in given.values()}) > 1:
        each = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        first = next(iter(given))
        raise ValueError(f"{op}: all tensors must be on one device; got {each}. Try .to({first}.device).")


def can_read_values(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing and breaks nothing: a plain CPU tensor, and no tracing or vmap."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def check_top_k_index(op: str, index: Tensor, experts: int) -> None:
    """Every index is an expert, or `experts` itself: a slot that another rank serves."""
    if not index.numel() or not can_read_values(index):
        return
    low, high = (int(value) for value in torch.aminmax(index))
    if low < 0 or high > experts:
        raise ValueError(
            f"{op}: top_k_index must be in 0 ... num_experts = {experts} ({experts} itself marks a slot without an "
            f"expert); got {low if low < 0 else high}."
        )


def read_group_sizes(group_sizes: Tensor, m: int) -> list[int]:
    """The sizes as Python numbers, none negative, not more than m in sum."""
    sizes = group_sizes.tolist()
    if sizes and min(sizes) < 0:
        at = min(range(len(sizes)), key=sizes.__getitem__)
        raise ValueError(f"ragged_dot: group_sizes must not be negative; got group_sizes[{at}] = {sizes[at]}.")
    if sum(sizes) > m:
        raise ValueError(
            f"ragged_dot: sum(group_sizes) must be at most m = {m}, the rows of lhs; got {sum(sizes)}. "
            f"If these are cumulative offsets, use grouped_mm."
        )
    return sizes


def shape_text(tensor: Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"({sizes},)" if tensor.dim() == 1 else f"({sizes})"


def dtype_text(tensor: Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
