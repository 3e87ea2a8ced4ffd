# ruff: noqa: E501 - a message is easier to compare in one line
"""What is refused, in which words, and the same on every path."""

import pytest
import torch
from moe_experts import moe_experts
from moe_experts._bridge import use_path

LAYER = {
    "hidden_states": torch.ones(4, 6),
    "gate_up_proj": torch.ones(3, 10, 6),
    "down_proj": torch.ones(3, 6, 5),
    "top_k_index": torch.zeros(4, 2, dtype=torch.int64),
    "top_k_weights": torch.ones(4, 2),
}


@pytest.mark.parametrize("path", ["auto", "interpret"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"activation": "swish"},
            ValueError,
            r"activation must be a function or one of silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh, swiglu_oss; got \"swish\"\.",
        ),
        ({"activation": None}, ValueError, r"activation must be a function or one of .*; got \"None\"\."),
        ({"gate": "split"}, ValueError, r"gate must be \"concatenated\", \"interleaved\", None or a function; got \"split\"\."),
        (
            {"activation": "swiglu_oss", "gate": None},
            ValueError,
            r"activation \"swiglu_oss\" needs a gate, \"concatenated\" or \"interleaved\"; got None\.",
        ),
        (
            {"activation": "swiglu_oss", "gate": lambda y: y},
            ValueError,
            r"activation \"swiglu_oss\" needs a gate, \"concatenated\" or \"interleaved\"; got a function\.",
        ),
        ({"limit": 7.0, "gate": None}, ValueError, r"limit needs gate to be \"concatenated\" or \"interleaved\"; got None\."),
        ({"limit": 7.0, "gate": lambda y: y}, ValueError, r"limit needs gate to be .*; got a function\."),
        ({"limit": 0.0}, ValueError, r"limit must be above 0; got 0\.0\."),
        ({"limit": float("nan")}, ValueError, r"limit must be above 0; got nan\."),
        ({"hidden_states": torch.ones(2, 2, 6)}, ValueError, r"hidden_states must be \(t, h\); got \(2, 2, 6\)\. Try \.flatten"),
        (
            {"gate_up_proj": torch.ones(3, 6, 10)},
            ValueError,
            r"gate_up_proj must be \(e, 2 \* i, h\) = \(e, 2 \* i, 6\) to match hidden_states \(t, h\) = \(4, 6\); "
            r"got \(3, 6, 10\)\. Try transposed=True\.",
        ),
        (
            {"down_proj": torch.ones(3, 5, 6)},
            ValueError,
            r"down_proj must be \(e, h, i\) = \(3, 6, 10 / 2\) to match gate_up_proj .*; got \(3, 5, 6\)\.",
        ),
        (
            {"down_proj": torch.ones(3, 6, 5).bfloat16()},
            TypeError,
            r"down_proj must have the dtype of hidden_states, float32; got bfloat16\.",
        ),
        ({"hidden_states": torch.ones(4, 6, dtype=torch.int32)}, TypeError, r"hidden_states is int32; supported: float32, bf"),
        ({"top_k_index": torch.zeros(4, 2)}, TypeError, r"top_k_index is float32; supported: int32, int64\."),
        (
            {"top_k_weights": torch.ones(4, 3)},
            ValueError,
            r"top_k_weights must be \(t, top_k\) = \(4, 2\) to match top_k_index; got \(4, 3\)\.",
        ),
        (
            {"top_k_index": torch.tensor([[0, 4]] * 4)},
            ValueError,
            r"top_k_index must be in 0 \.\.\. num_experts = 3 \(3 itself marks a slot without an expert\); got 4\.",
        ),
        ({"top_k_index": torch.tensor([[0, -1]] * 4)}, ValueError, r"top_k_index must be in 0 .*; got -1\."),
        ({"gate_up_bias": torch.ones(3, 5)}, ValueError, r"gate_up_bias must be \(e, 2 \* i\) = \(3, 10\); got \(3, 5\)\."),
        ({"down_bias": torch.ones(2, 6)}, ValueError, r"down_bias must be \(e, h\) = \(3, 6\); got \(2, 6\)\."),
        ({"down_proj": torch.ones(3, 6, 5, device="meta")}, ValueError, r"all tensors must be on one device; got hidden_states on cpu,"),
        ({"hidden_states": [[1.0]]}, TypeError, r"hidden_states must be a tensor; got list\."),
        ({"down_bias": [1.0]}, TypeError, r"down_bias must be a tensor; got list\."),
        ({"down_proj": None}, TypeError, r"down_proj must be a tensor; got NoneType\."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_moe_experts_refuses(change, error, message, path):
    with use_path(path), pytest.raises(error, match="moe_experts: .*" + message):
        moe_experts(**{**LAYER, **change})


@pytest.mark.parametrize("path", ["auto", "interpret"])
def test_a_gate_must_keep_to_the_shape(path):
    message = r"moe_experts: gate must give \(s, i\) = \(8, 5\) to match down_proj; got \(8, 10\)\."
    with use_path(path), pytest.raises(ValueError, match=message):
        moe_experts(**LAYER, gate=lambda y: y)
