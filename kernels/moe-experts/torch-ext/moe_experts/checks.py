"""What moe_experts accepts beyond the checks of ragged-dot, and the words in which it refuses the rest."""

from __future__ import annotations

from torch import Tensor

from ._ragged_dot.moe import ACTIVATIONS

NAMES = (*ACTIVATIONS, "swiglu_oss")
TENSORS = ("hidden_states", "gate_up_proj", "down_proj", "top_k_index", "top_k_weights", "gate_up_bias", "down_bias")


def check_tensors(tensors: tuple[object, ...]) -> None:
    for name, tensor in zip(TENSORS, tensors, strict=True):
        if not isinstance(tensor, Tensor) and not (tensor is None and name.endswith("_bias")):
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
