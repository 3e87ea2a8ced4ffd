"""What moe_experts accepts beyond the checks of ragged-dot, and the words in which it refuses the rest."""

from __future__ import annotations

from ._ragged_dot.moe import ACTIVATIONS

NAMES = (*ACTIVATIONS, "swiglu_oss")


def check_names(activation: object, gate: object, limit: object) -> None:
    if not callable(activation) and activation not in NAMES:
        raise ValueError(
            f'moe_experts: activation must be a function or one of {", ".join(NAMES)}; got "{activation}".'
        )
    if not callable(gate) and gate not in ("concatenated", "interleaved", None):
        raise ValueError(f'moe_experts: gate must be "concatenated", "interleaved", None or a function; got "{gate}".')
    if activation == "swiglu_oss" and gate is None:
        raise ValueError(
            'moe_experts: activation "swiglu_oss" needs a gate, "concatenated" or "interleaved"; got None.'
        )
    if limit is not None and (gate is None or callable(gate)):
        got = "None" if gate is None else "a function"
        raise ValueError(f'moe_experts: limit needs gate to be "concatenated" or "interleaved"; got {got}.')
    if limit is not None and not limit > 0:
        raise ValueError(f"moe_experts: limit must be above 0; got {limit}.")
