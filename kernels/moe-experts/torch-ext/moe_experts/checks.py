"""What moe_experts accepts beyond the checks of ragged-dot, and the words in which it refuses the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ragged_dot.checks import check_one_device, dtype_text, shape_text
from ._ragged_dot.moe import ACTIVATIONS
from .quantized import DTYPES, how_stored
from .stored import GROUPS, SQUARE

NAMES = (*ACTIVATIONS, "swiglu_oss")
NEEDED = ("hidden_states", "gate_up_proj", "down_proj", "top_k_index", "top_k_weights")
_DTYPES = tuple(DTYPES.values())
TENSORS = (*NEEDED, "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")


def check_tensors(tensors: tuple[object, ...]) -> None:
    for name, tensor in zip(TENSORS, tensors, strict=True):
        if not isinstance(tensor, Tensor) and not (tensor is None and name not in NEEDED):
            raise TypeError(
                f"moe_experts: {name} must be a tensor; got {type(tensor).__name__}. Try torch.tensor({name})."
            )


def check_names(activation: object, gate: object, limit: float | None) -> None:
    if not callable(activation) and activation not in NAMES:
        raise ValueError(
            f'moe_experts: activation must be a function or one of {", ".join(NAMES)}; got "{activation}".'
        )
    if not callable(gate) and gate not in ("concatenated", "interleaved", None):
        raise ValueError(f'moe_experts: gate must be "concatenated", "interleaved", None or a function; got "{gate}".')
    got = "None" if gate is None else "a function"
    if activation == "swiglu_oss" and not isinstance(gate, str):
        raise ValueError(
            f'moe_experts: activation "swiglu_oss" needs a gate, "concatenated" or "interleaved"; got {got}.'
        )
    if limit is not None and not isinstance(gate, str):
        raise ValueError(f'moe_experts: limit needs gate to be "concatenated" or "interleaved"; got {got}.')
    if limit is not None and not limit > 0:
        raise ValueError(f"moe_experts: limit must be above 0; got {limit}.")


def is_quantized(gate_up_proj: Tensor, down_proj: Tensor, *scales: Tensor | None) -> bool:
    """Whether they are meant to be: by a scale, or by a dtype that needs one."""
    return any(scale is not None for scale in scales) or gate_up_proj.dtype in _DTYPES or down_proj.dtype in _DTYPES


def check_quantized(tensors: tuple, gated: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Tensors in the order of TENSORS. Returns empty tensors of the shapes and the dtype that the weights stand for."""
    names = dict(zip(TENSORS, tensors, strict=True))
    scales = {name: names[name] for name in ("gate_up_scale", "down_scale")}
    if any(scale is None for scale in scales.values()):
        missing = " and ".join(name for name, scale in scales.items() if scale is None)
        raise ValueError(
            f"moe_experts: gate_up_scale and down_scale go with quantised weights, both or none; gate_up_proj is "
            f"{dtype_text(names['gate_up_proj'])}, down_proj {dtype_text(names['down_proj'])}; missing: {missing}."
        )
    if not transposed:
        raise ValueError(
            "moe_experts: quantised weights must be (e, in, out), with transposed=True; got transposed=False. "
            "Try quantize(gate_up_proj.mT, ...) and transposed=True."
        )
    check_one_device("moe_experts", names)
    hidden_states, gate_up_proj, down_proj = tensors[:3]
    for name, data in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if data.dtype not in _DTYPES or data.dtype != gate_up_proj.dtype:
            raise TypeError(
                f"moe_experts: quantised weights must both be int8, float8_e4m3fn, or uint8 (two four-bit values); "
                f"{name} is {dtype_text(data)}, gate_up_proj {dtype_text(gate_up_proj)}. Try quantize({name}, ...)."
            )
    h = hidden_states.shape[-1] if hidden_states.dim() else 0
    first = _stand_in("gate_up_proj", gate_up_proj, hidden_states, h, "h")
    width = first.shape[-1] if first.dim() else 0
    i = width // 2 if gated else width
    second = _stand_in("down_proj", down_proj, hidden_states, i, "i")
    for (name, scale), data, weight in zip(scales.items(), (gate_up_proj, down_proj), (first, second), strict=True):
        _check_scale(name, scale, data, weight)
    return first, second


def _stand_in(name: str, data: Tensor, hidden_states: Tensor, rows: int, letter: str) -> Tensor:
    shape = data.shape
    if data.dtype == torch.uint8 and data.dim() == 3:
        if shape[1] != -(-rows // 2):
            raise ValueError(
                f"moe_experts: {name} is uint8, two rows in a byte, so it must be (e, ceil({letter} / 2), ...) = "
                f"(e, {-(-rows // 2)}, ...) for {letter} = {rows}; got {shape_text(data)}."
            )
        shape = (shape[0], rows, shape[2])
    return hidden_states.new_empty(()).expand(shape)


def _check_scale(name: str, scale: Tensor, data: Tensor, weight: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"moe_experts: {name} is {dtype_text(scale)}; it must be float32. Try {name}.float().")
    if weight.dim() != 3:  # which is refused with the other shapes
        return
    e, rows, columns = weight.shape
    try:
        fits = scale.dim() == 3 and scale.shape[0] == e and how_stored(data, scale, rows)
    except ValueError:
        fits = False
    if not fits:
        blocks = " or ".join(str(-(-rows // group)) for group in GROUPS)
        raise ValueError(
            f"moe_experts: {name} must be (e, a, b), e = {e}, a = 1 or ceil(in / {', '.join(map(str, GROUPS))}) = "
            f"{blocks}, b = 1, out = {columns} or ceil(out / {SQUARE}) = {-(-columns // SQUARE)}, to match a weight "
            f"(e, in, out) = {shape_text(weight)}; got {shape_text(scale)}."
        )
