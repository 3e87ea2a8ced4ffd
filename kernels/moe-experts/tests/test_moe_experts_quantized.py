# ruff: noqa: E501 - a message is easier to compare in one line
"""Quantised weights: what the formats promise, the layer that runs with them on every path, and what is refused."""

from dataclasses import replace

import pytest
import torch
from moe_experts import FORMATS, dequantize, moe_experts, quantize
from moe_experts._bridge import record_paths, use_path
from moe_experts.cases import Case
from moe_experts.op import _fused
from moe_experts.quantized import RANGE, pack
from moe_experts.quantized_dot import _product, quantized_dot
from moe_experts_checks import tolerance
from moe_experts_torch import call_of, loop_over_tokens

FUSED, PRODUCT = "moe_experts::moe_experts", "moe_experts::quantized_dot"
ODD = Case(
    5, 70, 37, 4, 2, routed=6, transposed=True
)  # no block of the formats divides a size, and slots without expert
WIDE = Case(3, 300, 160, 3, 2, gate="interleaved", activation="gelu_tanh", bias=True, transposed=True)
EVEN = Case(3, 192, 64, 3, 2, routed=4, gate="interleaved", bias=True, transposed=True)  # whole registers
CASES = (
    ODD,
    WIDE,
    replace(ODD, gate="none", activation="relu2"),
    replace(ODD, gate="interleaved", activation="swiglu_oss", limit=1.0, bias=True),
)
BY_FORMAT = pytest.mark.parametrize("format", FORMATS)


def quantized_call(case: Case, format: str, dtype: torch.dtype = torch.float32):
    """Arguments and keywords of moe_experts, and the same with the weights that the data stands for."""
    (x, *weights, index, scores), names = call_of(case, dtype)
    stored = [quantize(weight, format) for weight in weights]
    scales = dict(zip(("gate_up_scale", "down_scale"), (scale for _, scale in stored), strict=True))
    floats = [dequantize(*pair, weight.shape[1]) for pair, weight in zip(stored, weights, strict=True)]
    return (x, *(data for data, _ in stored), index, scores), {**names, **scales}, (x, *floats, index, scores), names


def exact(floats, names):
    wide = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in names.items()}
    return loop_over_tokens(*(part.double() if part.is_floating_point() else part for part in floats), **wide)


def weight_of(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Formats


@BY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 300, 37), (2, 65, 260), (2, 1, 1)], ids=str)
def test_error_is_at_most_half_a_step(format, shape, dtype):
    weight = weight_of(*shape, dtype=dtype)
    data, scale = quantize(weight, format)
    numbers = dequantize(data, torch.ones_like(scale), shape[1])
    assert scale.dtype == torch.float32
    assert numbers.abs().max() in RANGE[FORMATS[format].kind] or numbers.min() == -8
    if FORMATS[format].kind == "fp8":  # 4 significant bits, and 2 ** -9 the smallest number
        half = (numbers.abs() / 16).clamp_min(2.0**-10)
    else:
        half = torch.full_like(numbers, 0.5)
    step = dequantize(data, scale, shape[1]) / torch.where(numbers == 0, 1, numbers)  # the scale of each weight
    error = (weight.float() - dequantize(data, scale, shape[1])).abs()
    known = numbers != 0
    assert (error <= half * step * 1.001)[known].all()
    largest_step = scale.amax(dim=(1, 2)).view(-1, 1, 1)
    assert (error <= half * largest_step * 1.001).all()


@pytest.mark.parametrize(
    ("format", "data", "scale"),
    [
        ("int8", (2, 300, 260), (2, 1, 260)),
        ("fp8", (2, 300, 260), (2, 1, 260)),
        ("fp8-tensor", (2, 300, 260), (2, 1, 1)),
        ("fp8-block", (2, 300, 260), (2, 3, 3)),
        ("int4", (2, 150, 260), (2, 3, 260)),
        ("int4-g64", (2, 150, 260), (2, 5, 260)),
        ("int4-g32", (2, 150, 260), (2, 10, 260)),
    ],
)
def test_shapes(format, data, scale):
    made = quantize(weight_of(2, 300, 260), format)
    assert tuple(part.shape for part in made) == (data, scale)
    assert all(part.is_contiguous() for part in made)


def test_every_block_has_its_own_scale():
    weight = torch.ones(1, 256, 256)
    weight[0, 128:, :128], weight[0, :128, 128:], weight[0, 128:, 128:] = 2, 4, 8
    _, scale = quantize(weight, "fp8-block")
    assert torch.equal(scale[0] * 448, torch.tensor([[1.0, 4.0], [2.0, 8.0]]))
    _, scale = quantize(weight, "int4")
    assert torch.allclose(scale[0, :, ::128] * 7.5, torch.tensor([[1.0, 4.0], [2.0, 8.0]]))


def test_two_rows_in_a_byte():
    numbers = torch.tensor([[-8, 7], [3, -1], [5, 0]], dtype=torch.int8)
    data = pack(numbers)
    assert data.tolist() == [[0x38, 0xF7], [0x05, 0x00]]
    assert torch.equal(dequantize(data[None], torch.ones(1, 1, 1), 3)[0], numbers.float())
    assert dequantize(data[None], torch.ones(1, 1, 1)).shape == (1, 4, 2)


@BY_FORMAT
def test_zeros_have_scale_one_and_so_has_what_no_scale_reaches(format):
    weight = weight_of(2, 64, 130)
    weight[0] = 0
    weight[1, :, :128] = 1e-42
    data, scale = quantize(weight, format)
    assert (scale[0] == 1).all()
    assert not dequantize(data, scale)[0].any()
    if format != "fp8-tensor":
        assert (scale[1, ..., 0] == 1).all()
        assert not dequantize(data, scale)[1, :, :128].any()
    assert dequantize(data, scale).isfinite().all()


@BY_FORMAT
@pytest.mark.parametrize("largest", [3e38, 1e-30])
def test_extreme_weights(format, largest):
    weight = weight_of(1, 40, 8)
    weight *= largest / weight.abs().max()
    back = dequantize(*quantize(weight, format))
    assert ((back - weight).abs() <= largest / 7 * 0.501).all()


@BY_FORMAT
@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_nothing_to_quantize(format, shape):
    assert dequantize(*quantize(torch.empty(shape), format), shape[1]).shape == shape


@BY_FORMAT
def test_a_transposed_view_gives_the_same(format):
    weight = weight_of(2, 70, 40)
    for one, other in zip(quantize(weight, format), quantize(weight.mT.contiguous().mT, format), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_all_numbers_of_fp8_and_its_nan(dtype):
    """The fast way on CPU moves bits; torch's own conversion says what they mean."""
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 2, 128)
    one = torch.ones(1, 1, 1)
    assert dequantize(data, one, dtype=dtype).isnan().sum() == 2
    assert torch.equal(dequantize(data, one, dtype=dtype).nan_to_num(1e3), data.float().to(dtype).nan_to_num(1e3))
    finite = torch.where(data.float().isnan(), torch.zeros(()), data.float()).to(torch.float8_e4m3fn)
    assert torch.equal(dequantize(finite, one, dtype=dtype), finite.float().to(dtype))


# The layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@BY_FORMAT
def test_equals_a_loop_over_what_the_data_stands_for(case, format, dtype):
    arguments, keywords, floats, names = quantized_call(case, format, dtype)
    with record_paths() as ran:
        got = moe_experts(*arguments, **keywords)
    assert ran == [(PRODUCT, "torch")] * 2
    assert got.dtype == dtype
    wanted = exact(floats, names)
    # In float64 too, weights and scales are float32. Each product is rounded once more than with float weights.
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance(case, 1.5 * eps, wanted.numpy()))


@pytest.mark.parametrize(
    ("format", "case"),
    [("int8", EVEN), ("fp8-block", EVEN), ("int4-g32", EVEN), ("fp8", ODD)],
    ids=["int8", "fp8-block", "int4-g32", "fp8-odd"],
)
def test_the_interpreted_kernel_gives_the_same(format, case):
    arguments, keywords, floats, names = quantized_call(case, format)
    with use_path("interpret"), record_paths() as ran:
        got = moe_experts(*arguments, **keywords)
    assert ran == [(FUSED, "interpret")]
    wanted = exact(floats, names)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance(case, 2.0**-23, wanted.numpy()))


@pytest.mark.parametrize(("format", "path"), [("int8", "torch"), ("int4-g32", "torch"), ("fp8-block", "interpret")])
def test_gradients_equal_those_of_a_loop(format, path):
    case = replace(ODD, bias=True) if path == "torch" else Case(2, 40, 8, 2, 1, bias=True, transposed=True)
    arguments, keywords, floats, names = quantized_call(case, format)

    def gradients(function, arguments, keywords):
        leaves = [arguments[0], arguments[4], keywords["gate_up_bias"], keywords["down_bias"]]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        x, scores, keywords["gate_up_bias"], keywords["down_bias"] = leaves
        out = function(x, *arguments[1:4], scores, **keywords)
        return torch.autograd.grad(out.square().sum(), leaves)

    with use_path(path), record_paths() as ran:
        got = gradients(moe_experts, arguments, keywords)
    assert ran == [(PRODUCT, path)] * 4
    for one, other in zip(got, gradients(loop_over_tokens, floats, names), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@BY_FORMAT
def test_product_of_few_and_of_many_rows_and_its_gradient(format, dtype):
    """Rows of no group are zero; the weight is taken in parts for few rows, and whole for many."""
    k, n, sizes = 300, 37, (1, 0, 20, 2)
    data, scale = quantize(weight_of(len(sizes), k, n) * k**-0.5, format)
    weight = dequantize(data, scale, k).double()
    x, grad = weight_of(sum(sizes) + 2, k, seed=1, dtype=dtype), weight_of(sum(sizes) + 2, n, seed=2, dtype=dtype)
    x.requires_grad_()
    out = quantized_dot(x, data, scale, torch.tensor(sizes))
    out.backward(grad)
    wanted, wanted_grad = torch.zeros(len(x), n).double(), torch.zeros(len(x), k).double()
    start = 0
    for size, one in zip(sizes, weight, strict=True):
        rows = slice(start, start + size)
        wanted[rows], wanted_grad[rows] = x.detach()[rows].double() @ one, grad[rows].double() @ one.mT
        start += size
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for came, exactly in ((out.detach(), wanted), (x.grad, wanted_grad)):
        assert came.dtype == dtype
        assert not came[-2:].any()
        # The weight or the product is rounded, and the result; float32 sums of at most 300 terms.
        torch.testing.assert_close(came.double(), exactly, rtol=2 * eps, atol=2 * eps * exactly.abs().max().item())


def test_float16_does_not_overflow_between_number_and_scale():
    weight = torch.full((1, 512, 8), 0.01)
    x = torch.full((8, 512), 4.0, dtype=torch.float16)  # times 127 and summed it would be 260096, times 448 more
    for format in FORMATS:
        data, scale = quantize(weight, format)
        for rows in (1, 8):
            out = quantized_dot(x[:rows], data, scale, torch.tensor([rows]))
            wanted = (dequantize(data, scale)[0].sum(dim=0) * 4).expand(rows, 8)
            torch.testing.assert_close(out.float(), wanted, rtol=2e-3, atol=0)


def test_the_product_has_gradients_of_any_order():
    data, scale = quantize(weight_of(2, 6, 4, dtype=torch.float64), "int8")
    sizes = torch.tensor([2, 1])
    x = weight_of(4, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: quantized_dot(x, data, scale, sizes).square(), (x,), atol=1e-4)
    assert torch.autograd.gradgradcheck(lambda x: quantized_dot(x, data, scale, sizes).square(), (x,), atol=1e-4)


def test_functions_for_gate_activation_and_norm():
    arguments, keywords, floats, names = quantized_call(ODD, "int8")
    keywords |= {"gate": lambda y: y[:, ::2] * y[:, 1::2], "output_norm": lambda y: y / 2}
    names |= {"gate": keywords["gate"], "output_norm": keywords["output_norm"]}
    torch.testing.assert_close(moe_experts(*arguments, **keywords), moe_experts(*floats, **names), rtol=1e-4, atol=1e-4)
    keywords |= {"gate": "concatenated", "activation": torch.tanh}
    names |= {"gate": "concatenated", "activation": torch.tanh}
    torch.testing.assert_close(moe_experts(*arguments, **keywords), moe_experts(*floats, **names), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("missing", ["gate_up_bias", "down_bias"])
def test_one_bias_alone(missing):
    arguments, keywords, floats, names = quantized_call(WIDE, "int8")
    keywords[missing] = names[missing] = None
    torch.testing.assert_close(
        moe_experts(*arguments, **keywords), loop_over_tokens(*floats, **names), rtol=1e-4, atol=1e-4
    )


def test_autocast_computes_in_its_dtype():
    arguments, keywords, _, _ = quantized_call(ODD, "int8")
    narrow = [part.bfloat16() if part.dtype == torch.float32 else part for part in arguments]
    with torch.autocast("cpu", torch.bfloat16):
        got = moe_experts(*arguments, **keywords)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, moe_experts(*narrow, **keywords).float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("path", ["torch", "interpret"])
def test_no_tokens(path):
    arguments, keywords, _, _ = quantized_call(replace(ODD, t=0), "int4")
    with use_path(path):
        assert moe_experts(*arguments, **keywords).shape == (0, 70)


def test_a_nan_in_an_expert_that_nobody_chose_reaches_no_result():
    arguments, keywords, _, _ = quantized_call(ODD, "fp8")
    index = arguments[3].clamp(max=1)
    wanted = moe_experts(*arguments[:3], index, arguments[4], **keywords)
    for scale in ("gate_up_scale", "down_scale"):
        keywords[scale][2:] = torch.nan
    assert torch.equal(moe_experts(*arguments[:3], index, arguments[4], **keywords), wanted)


def test_compiles_to_one_graph_with_gradients():
    arguments, keywords, _, _ = quantized_call(ODD, "int4-g32")
    x, *others = arguments

    def gradient(function):
        leaf = x.clone().requires_grad_()
        out = function(leaf, *others, **keywords)
        return out.detach(), *torch.autograd.grad(out.sum(), (leaf,))

    torch._dynamo.reset()
    compiled = torch.compile(moe_experts, fullgraph=True, backend="aot_eager")
    for one, other in zip(gradient(compiled), gradient(moe_experts), strict=True):
        torch.testing.assert_close(one, other)


def test_vmap_over_hidden_states():
    arguments, keywords, _, _ = quantized_call(ODD, "int8")
    x = torch.stack([arguments[0], arguments[0] * 2])
    got = torch.func.vmap(lambda x: moe_experts(x, *arguments[1:], **keywords))(x)
    wanted = [moe_experts(one, *arguments[1:], **keywords) for one in x]
    torch.testing.assert_close(got, torch.stack(wanted))


@pytest.mark.parametrize("format", ["int8", "int4-g32"])  # opcheck cannot compare float8
def test_opcheck(format):
    arguments, keywords, _, _ = quantized_call(ODD, format)
    scales = (keywords["gate_up_scale"], keywords["down_scale"])
    torch.library.opcheck(_fused.overload, (*arguments, None, None, *scales, "silu", "concatenated", None, True))
    sizes = torch.tensor([2, 0, 2, 1])
    for transpose, columns in ((False, 70), (True, 74)):
        lhs = weight_of(6, columns).requires_grad_()
        product = (lhs, arguments[1], scales[0], sizes, 70, transpose)
        torch.library.opcheck(_product.overload, product, atol=1e-4, rtol=1e-4)


# Refusals


@pytest.mark.parametrize("path", ["auto", "interpret"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"gate_up_scale": None},
            ValueError,
            r"gate_up_scale and down_scale go with quantised weights, both or none; gate_up_proj is int8, down_proj int8; missing: gate_up_scale\.",
        ),
        (
            {"gate_up_scale": None, "down_scale": None},
            ValueError,
            r"gate_up_proj is int8, down_proj int8; missing: gate_up_scale and down_scale\.",
        ),
        (
            {"transposed": False},
            ValueError,
            r"quantised weights must be \(e, in, out\), with transposed=True; got transposed=False\. Try quantize\(gate_up_proj\.mT, \.\.\.\)",
        ),
        (
            {"down_proj": torch.ones(3, 5, 6)},
            TypeError,
            r"quantised weights must both be int8, float8_e4m3fn, or uint8 \(two four-bit values\); down_proj is float32, gate_up_proj int8\. Try quantize\(down_proj, \.\.\.\)\.",
        ),
        (
            {"down_proj": torch.ones(3, 3, 6, dtype=torch.uint8)},
            TypeError,
            r"down_proj is uint8, gate_up_proj int8\.",
        ),
        (
            {"gate_up_proj": torch.ones(3, 6, 10, dtype=torch.uint8), "down_proj": torch.ones(3, 3, 6, dtype=torch.uint8)},
            ValueError,
            r"gate_up_proj is uint8, two rows in a byte, so it must be \(e, ceil\(h / 2\), \.\.\.\) = \(e, 3, \.\.\.\) for h = 6; got \(3, 6, 10\)\.",
        ),
        (
            {"gate_up_proj": torch.ones(3, 3, 10, dtype=torch.uint8), "down_proj": torch.ones(3, 2, 6, dtype=torch.uint8)},
            ValueError,
            r"down_proj is uint8, two rows in a byte, so it must be \(e, ceil\(i / 2\), \.\.\.\) = \(e, 3, \.\.\.\) for i = 5; got \(3, 2, 6\)\.",
        ),
        (
            {"down_scale": torch.ones(3, 1, 6, dtype=torch.float16)},
            TypeError,
            r"down_scale is float16; it must be float32\. Try down_scale\.float\(\)\.",
        ),
        (
            {"down_scale": torch.ones(3, 2, 6)},
            ValueError,
            r"down_scale must be \(e, a, b\), e = 3, a = 1 or ceil\(in / 32, 64, 128\) = 1 or 1 or 1, b = 1, out = 6 or ceil\(out / 128\) = 1, to match a weight \(e, in, out\) = \(3, 5, 6\); got \(3, 2, 6\)\.",
        ),
        ({"gate_up_scale": torch.ones(2, 1, 10)}, ValueError, r"gate_up_scale must be \(e, a, b\), e = 3, .*; got \(2, 1, 10\)\."),
        ({"gate_up_scale": torch.ones(3, 10)}, ValueError, r"gate_up_scale must be \(e, a, b\), .*; got \(3, 10\)\."),
        ({"gate_up_scale": 1.0}, TypeError, r"gate_up_scale must be a tensor; got float\."),
        (
            {"down_scale": torch.ones(3, 1, 6, device="meta")},
            ValueError,
            r"all tensors must be on one device; got hidden_states on cpu, .*down_scale on meta",
        ),
        (
            {"gate_up_proj": torch.ones(3, 10, 6, dtype=torch.int8)},
            ValueError,
            r"gate_up_scale must be \(e, a, b\), e = 3, .* to match a weight \(e, in, out\) = \(3, 10, 6\)",
        ),
        (
            {"gate_up_proj": torch.ones(3, 10, 6, dtype=torch.int8), "gate_up_scale": torch.ones(3, 1, 6)},
            ValueError,
            r"gate_up_proj must be \(e, h, 2 \* i\) = \(e, 6, 2 \* i\) to match hidden_states \(t, h\) = \(4, 6\); got \(3, 10, 6\)\.",
        ),
        ({"top_k_index": torch.full((4, 2), 4)}, ValueError, r"top_k_index must be in 0 \.\.\. num_experts = 3"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_moe_experts_refuses(change, error, message, path):
    layer = {
        "hidden_states": torch.ones(4, 6),
        "gate_up_proj": torch.ones(3, 6, 10, dtype=torch.int8),
        "down_proj": torch.ones(3, 5, 6, dtype=torch.int8),
        "top_k_index": torch.zeros(4, 2, dtype=torch.int64),
        "top_k_weights": torch.ones(4, 2),
        "gate_up_scale": torch.ones(3, 1, 10),
        "down_scale": torch.ones(3, 1, 6),
        "transposed": True,
    }
    with use_path(path), pytest.raises(error, match="moe_experts: .*" + message):
        moe_experts(**{**layer, **change})


@pytest.mark.parametrize(
    ("weight", "format", "message"),
    [
        (torch.ones(1, 4, 4), "int2", r"quantize: format must be one of int8, fp8, fp8-tensor, .*; got \"int2\"\."),
        (torch.ones(4, 4), "int8", r"quantize: weight must be a float tensor \(e, in, out\); got float32 \(4, 4\)\."),
        (
            torch.ones(1, 4, 4).int(),
            "int8",
            r"quantize: weight must be a float tensor \(e, in, out\); got int32 \(1, 4, 4\)\.",
        ),
        (
            torch.tensor([[[1.0]], [[torch.nan]]]),
            "int8",
            r"quantize: weight must be finite; expert 1 holds NaN or infinity\.",
        ),
        (
            torch.tensor([[[torch.inf, 1]]]),
            "fp8-tensor",
            r"quantize: weight must be finite; expert 0 holds NaN or infinity\.",
        ),
        (
            torch.tensor([[[1.0], [torch.nan]]]),
            "int4",
            r"quantize: weight must be finite; expert 0 holds NaN or infinity\.",
        ),
    ],
)
def test_quantize_refuses(weight, format, message):
    with pytest.raises(ValueError, match=message):
        quantize(weight, format)
