# ruff: noqa: E501 - a message is easier to compare in one line
"""What is refused, and in which words."""

import pytest
import torch
from ragged_dot import grouped_mm, moe_experts, ragged_dot
from ragged_dot._bridge import use_path

X, W, SIZES = torch.ones(4, 3), torch.ones(2, 3, 5), torch.tensor([2, 2])


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((X[0], W, SIZES), {}, ValueError, r"ragged_dot: lhs must be \(m, k\); got \(3,\)\."),
        ((X, W[0], SIZES), {}, ValueError, r"ragged_dot: rhs must be \(g, k, n\); got \(3, 5\)\."),
        (
            (X, torch.ones(2, 5, 3), SIZES),
            {},
            ValueError,
            r"ragged_dot: rhs must be \(g, k, n\) = \(2, 3, n\) to match lhs \(m, k\) = \(4, 3\); got \(2, 5, 3\)\. "
            r"Try transpose_rhs=True\.",
        ),
        (
            (X, W, SIZES),
            {"transpose_rhs": True},
            ValueError,
            r"rhs must be \(g, n, k\) = \(2, n, 3\) .*; got \(2, 3, 5\)\. Try transpose_rhs=False\.",
        ),
        (
            (X, W, torch.tensor([4])),
            {},
            ValueError,
            r"group_sizes must be \(g,\) = \(2,\) to match rhs \(g, k, n\) = \(2, 3, 5\); got \(1,\)\.",
        ),
        (
            (X.int(), W, SIZES),
            {},
            TypeError,
            r"lhs is int32; supported: float32, bfloat16, float16, float64\. Try lhs\.to\(torch\.float32\)\.",
        ),
        (
            (X, W.bfloat16(), SIZES),
            {},
            TypeError,
            r"rhs must have the dtype of lhs, float32; got bfloat16\. Try rhs\.to\(lhs\.dtype\)\.",
        ),
        (
            (X, W, SIZES.float()),
            {},
            TypeError,
            r"group_sizes is float32; supported: int32, int64\. Try group_sizes\.to\(torch\.int32\)\.",
        ),
        (
            (X, W, torch.tensor([3, -1])),
            {},
            ValueError,
            r"group_sizes must not be negative; got group_sizes\[1\] = -1\.",
        ),
        (
            (X[:3], W, torch.tensor([2, 4])),
            {},
            ValueError,
            r"sum\(group_sizes\) must be at most m = 3, the rows of lhs; got 6\. .*cumulative offsets, use grouped_mm\.",
        ),
        (
            (X, torch.ones(3, 3, 5), torch.tensor([2, 2, 3])),
            {},
            ValueError,
            r"sum\(group_sizes\) must be at most m = 4.*got 7\. If these are cumulative offsets",
        ),
        ((X, W, torch.tensor([2**40 + 5, 0])), {}, ValueError, r"at most m = 4, the rows of lhs; got 1099511627781\."),
        (
            (X.to("meta"), W, SIZES),
            {},
            ValueError,
            r"all tensors must be on one device; got lhs on meta, rhs on cpu, group_sizes on cpu\. Try \.to\(lhs\.device\)\.",
        ),
        (
            (X, W, [2, 2]),
            {},
            TypeError,
            r"group_sizes must be a tensor; got list\. Try torch\.tensor\(group_sizes\)\.",
        ),
    ],
)
def test_ragged_dot_refuses(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        ragged_dot(*arguments, **keywords)


@pytest.mark.parametrize(
    ("lhs", "rhs", "message"),
    [
        (
            X,
            W.to(torch.uint8),
            r"ragged_dot: rhs is uint8; supported: float32, bfloat16, float16\. Try rhs\.to\(torch\.float32\)\.",
        ),
        (X, W.double(), r"ragged_dot: rhs is float64; supported: float32, bfloat16, float16\. Try"),
        (X.int(), W.int(), r"ragged_dot: lhs is int32; supported: float32, bfloat16, float16, float64\. Try"),
    ],
    ids=["packed", "float64", "integers"],
)
def test_autocast_makes_no_numbers_of_packed_weights(lhs, rhs, message):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=message):
        ragged_dot(lhs, rhs, SIZES)


@pytest.mark.parametrize("path", ["auto", "interpret"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": lambda x: x}, r"moe_experts: gate must give \(s, i\) = \(8, 5\) to match down_proj; got \(8, 10\)\."),
        ({"gate": lambda x: x[:2, :5]}, r"moe_experts: gate must give \(s, i\) = \(8, 5\) .*; got \(2, 5\)\."),
        (
            {"gate": None, "gate_up_proj": torch.ones(3, 5, 6), "activation": lambda x: x[:, :4]},
            r"moe_experts: activation must give \(s, i\) = \(8, 5\) to match down_proj; got \(8, 4\)\.",
        ),
    ],
    ids=["wide", "few", "activation"],
)
def test_a_gate_must_keep_to_the_shape(change, message, path):
    with use_path(path), pytest.raises(ValueError, match=message):
        moe_experts(**{**LAYER, **change})


def test_autocast_makes_no_numbers_of_packed_experts():
    packed = {**LAYER, "down_proj": LAYER["down_proj"].to(torch.uint8)}
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"moe_experts: down_proj is uint8; supp"),
    ):
        moe_experts(**packed)


@pytest.mark.parametrize(
    ("offs", "error", "message"),
    [
        (
            [3, 2],
            ValueError,
            r"grouped_mm: offs must not decrease; got offs\[1\] = 2 after offs\[0\] = 3\..*use ragged_dot",
        ),
        ([-1, 2], ValueError, r"grouped_mm: offs must not decrease; got offs\[0\] = -1 after 0\."),
        ([2, 9], ValueError, r"grouped_mm: offs must be at most m = 4, the rows of input; got offs\[1\] = 9\."),
        (
            [2.0, 4.0],
            TypeError,
            r"grouped_mm: offs is float32; supported: int32, int64\. Try offs\.to\(torch\.int32\)\.",
        ),
        (
            [2],
            ValueError,
            r"grouped_mm: offs must be \(g,\) = \(2,\) to match weight \(g, k, n\) = \(2, 3, 5\); got \(1,\)\.",
        ),
    ],
    ids=str,
)
def test_grouped_mm_refuses(offs, error, message):
    with pytest.raises(error, match=message):
        grouped_mm(X, W, torch.tensor(offs))


LAYER = {
    "hidden_states": torch.ones(4, 6),
    "gate_up_proj": torch.ones(3, 10, 6),
    "down_proj": torch.ones(3, 6, 5),
    "top_k_index": torch.zeros(4, 2, dtype=torch.int64),
    "top_k_weights": torch.ones(4, 2),
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_states": torch.ones(2, 2, 6)}, ValueError, r"hidden_states must be \(t, h\); got \(2, 2, 6\)\. Try \.flatten"),
        (
            {"gate_up_proj": torch.ones(3, 6, 10)},
            ValueError,
            r"gate_up_proj must be \(e, 2 \* i, h\) = \(e, 2 \* i, 6\) to match hidden_states \(t, h\) = \(4, 6\); "
            r"got \(3, 6, 10\)\. Try transposed=True\.",
        ),
        ({"gate_up_proj": torch.ones(3, 9, 6)}, ValueError, r"down_proj must be .* = \(3, 6, 9 / 2\) .*; got \(3, 6, 5\)\."),
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
        (
            {"top_k_index": torch.zeros(5, 2, dtype=torch.int64)},
            ValueError,
            r"top_k_index must be \(t, top_k\) = \(4, top_k\) .*; got \(5, 2\)\.",
        ),
        (
            {"top_k_weights": torch.ones(4, 3)},
            ValueError,
            r"top_k_weights must be \(t, top_k\) = \(4, 2\) to match top_k_index; got \(4, 3\)\.",
        ),
        ({"top_k_index": torch.zeros(4, 2)}, TypeError, r"top_k_index is float32; supported: int32, int64\."),
        ({"top_k_weights": torch.ones(4, 2, dtype=torch.int64)}, TypeError, r"top_k_weights is int64; it must be a float"),
        (
            {"top_k_index": torch.tensor([[0, 4]] * 4)},
            ValueError,
            r"top_k_index must be in 0 \.\.\. num_experts = 3 \(3 itself marks a slot without an expert\); got 4\.",
        ),
        ({"top_k_index": torch.tensor([[0, -1]] * 4)}, ValueError, r"top_k_index must be in 0 .*; got -1\."),
        ({"gate_up_bias": torch.ones(3, 5)}, ValueError, r"gate_up_bias must be \(e, 2 \* i\) = \(3, 10\); got \(3, 5\)\."),
        ({"down_bias": torch.ones(2, 6)}, ValueError, r"down_bias must be \(e, h\) = \(3, 6\); got \(2, 6\)\."),
        (
            {"activation": "swish"},
            ValueError,
            r"activation must be a function or one of silu, gelu, gelu_tanh, relu, relu2, sigmoid, tanh; got \"swish\"\.",
        ),
        ({"gate": "split"}, ValueError, r"gate must be \"concatenated\", \"interleaved\", None or a function; got \"split\"\."),
        ({"down_proj": None}, TypeError, r"down_proj must be a tensor; got None\. Only gate_up_bias and down_bias may be left out\."),
        ({"hidden_states": [[1.0]]}, TypeError, r"hidden_states must be a tensor; got list\. Try torch\.tensor\(hidden_states\)\."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_moe_experts_refuses(change, error, message):
    with pytest.raises(error, match="moe_experts: .*" + message):
        moe_experts(**{**LAYER, **change})
