"""moe_experts and experts_forward against a loop over tokens and against Transformers' own eager experts."""

import pytest
import torch
from ragged_dot import experts_forward, moe_experts
from ragged_dot_checks import loop_over_tokens

# Two float32 sums of the same terms in different orders.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def _layer(t, h, i, e, top_k, seed=0):
    torch.manual_seed(seed)
    x, gate_up, down = torch.randn(t, h), torch.randn(e, 2 * i, h) * h**-0.5, torch.randn(e, h, i) * i**-0.5
    scores, index = torch.rand(t, e).softmax(-1).topk(top_k)
    return [x.requires_grad_(), gate_up.requires_grad_(), down.requires_grad_()], index, scores.requires_grad_()


def _assert_equals_loop(leaves, index, scores):
    wanted = loop_over_tokens(*leaves, index, scores)
    got = moe_experts(*leaves, index, scores)
    torch.testing.assert_close(got, wanted, **CLOSE)
    upstream = torch.randn_like(wanted)
    inputs = (*leaves, scores)
    got_grads = torch.autograd.grad(got, inputs, upstream)
    wanted_grads = torch.autograd.grad(wanted, inputs, upstream, materialize_grads=True)
    for one, other in zip(got_grads, wanted_grads, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    return got_grads


def test_45_tokens_of_128_experts():
    leaves, index, scores = _layer(45, 16, 8, 128, 8)
    grads = _assert_equals_loop(leaves, index, scores)
    unused = sorted(set(range(128)) - set(index.flatten().tolist()))
    assert unused
    assert not grads[1][unused].any()
    assert not grads[2][unused].any()


def test_without_experts_a_bias_changes_nothing():
    x, index, scores = torch.randn(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    biases = {"gate_up_bias": torch.ones(0, 12), "down_bias": torch.ones(0, 4)}
    assert not moe_experts(x, torch.ones(0, 12, 4), torch.ones(0, 4, 6), index, scores, **biases).any()


def test_a_gate_that_computes_in_float32_is_rounded_before_the_second_product():
    (x, gate_up, down), index, scores = _layer(5, 8, 6, 4, 2)
    layer = [tensor.bfloat16() for tensor in (x, gate_up, down)]

    def gate(y):
        return y[:, :6].float().sigmoid() * y[:, 6:].float()

    wide = moe_experts(*layer, index, scores, gate=gate)
    assert torch.equal(wide, moe_experts(*layer, index, scores, gate=lambda y: gate(y).bfloat16()))


@pytest.mark.parametrize("expert", [0, 5])
def test_all_tokens_to_one_expert(expert):
    leaves, index, scores = _layer(9, 8, 4, 6, 1)
    _assert_equals_loop(leaves, torch.full_like(index, expert), scores)


@pytest.mark.parametrize(("t", "top_k"), [(1, 2), (7, 1), (7, 6), (0, 2)])
def test_few_tokens_top_1_and_top_all(t, top_k):
    leaves, index, scores = _layer(max(t, 1), 8, 4, 6, top_k)
    if t:
        _assert_equals_loop(leaves, index, scores)
    else:
        assert moe_experts(leaves[0][:0], *leaves[1:], index[:0], scores[:0]).shape == (0, 8)


def test_the_same_expert_twice_and_scores_that_do_not_sum_to_one():
    leaves, index, _ = _layer(5, 8, 4, 6, 3)
    index[:, 1] = index[:, 0]
    _assert_equals_loop(leaves, index, torch.randn(5, 3).requires_grad_())


def test_permuting_the_slots_of_a_token_changes_rounding_only():
    leaves, index, scores = _layer(11, 8, 4, 16, 4)
    order = torch.randperm(4)
    torch.testing.assert_close(
        moe_experts(*leaves, index[:, order], scores[:, order]), moe_experts(*leaves, index, scores), **CLOSE
    )


def test_permuting_tokens_permutes_the_result():
    leaves, index, scores = _layer(11, 8, 4, 16, 4)
    order = torch.randperm(11)
    torch.testing.assert_close(
        moe_experts(leaves[0][order], *leaves[1:], index[order], scores[order]),
        moe_experts(*leaves, index, scores)[order],
        **CLOSE,
    )


def test_a_slot_without_an_expert_counts_for_nothing_whatever_its_weight():
    leaves, index, scores = _layer(6, 8, 4, 5, 3)
    index[1, 2], index[4] = 5, 5
    scores = scores.detach().clone()
    scores[4, 0] = float("nan")
    scores.requires_grad_()
    grads = _assert_equals_loop(leaves, index, scores)
    assert not grads[3][4].any()
    assert not grads[3][1, 2].any()
    assert not grads[0][4].any()
    assert not moe_experts(*leaves, index, scores)[4].any()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", torch.nn.functional.softplus])
@pytest.mark.parametrize("gate", ["concatenated", "interleaved", None])
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_and_activations(activation, gate, transposed):
    torch.manual_seed(0)
    t, h, i, e, width = 6, 8, 5, 4, 5 if gate is None else 10
    x, first, second = torch.randn(t, h), torch.randn(e, width, h), torch.randn(e, h, i)
    first_bias, second_bias = torch.randn(e, width), torch.randn(e, h)
    scores, index = torch.rand(t, e).topk(2)
    act = (
        activation
        if callable(activation)
        else {
            "silu": torch.nn.functional.silu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": torch.nn.GELU(approximate="tanh"),
            "relu": torch.relu,
            "relu2": lambda x: torch.relu(x) ** 2,
        }[activation]
    )
    wanted = torch.zeros(t, h)
    for token in range(t):
        for slot in range(2):
            expert = index[token, slot]
            y = first[expert] @ x[token] + first_bias[expert]
            if gate == "concatenated":
                y = act(y[:i]) * y[i:]
            else:
                y = act(y[::2]) * y[1::2] if gate else act(y)
            wanted[token] += scores[token, slot] * (second[expert] @ y + second_bias[expert])
    if transposed:
        first, second = first.transpose(1, 2).contiguous(), second.transpose(1, 2).contiguous()
    got = moe_experts(
        x, first, second, index, scores,
        activation=activation, gate=gate, transposed=transposed, gate_up_bias=first_bias, down_bias=second_bias,
    )  # fmt: skip
    torch.testing.assert_close(got, wanted, **CLOSE)


# One class per layout that Transformers has: plain, own gate, interleaved + bias + transposed, concatenated + bias +
# transposed, transposed, no gate, norm after each expert.
EXPERTS = {
    "qwen3_moe.Qwen3MoeExperts": ("Qwen3MoeConfig", {}),
    "deepseek_v3.DeepseekV3Experts": ("DeepseekV3Config", {}),
    "gpt_oss.GptOssExperts": ("GptOssConfig", {}),
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": ("OpenAIPrivacyFilterConfig", {}),
    "aria.AriaExperts": ("AriaTextConfig", {}),
    "nemotron_h.NemotronHExperts": ("NemotronHConfig", {}),
    "muse_spark.MuseSparkExperts": ("MuseSparkTextConfig", {}),
}
SIZES = {
    "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 12, "moe_hidden_size": 16,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "moe_latent_size": None,
}  # fmt: skip


def _build_experts(path, dtype=torch.float32):
    transformers = pytest.importorskip("transformers")
    import importlib

    module, name = path.split(".")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config_name, extra = EXPERTS[path]
    config = getattr(transformers if hasattr(transformers, config_name) else modeling, config_name)()
    for key, value in {**SIZES, **extra}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._experts_implementation = "eager"
    experts = getattr(modeling, name)(config)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype)


@pytest.mark.parametrize("path", EXPERTS)
def test_experts_forward_equals_eager_in_values_and_gradients(path):
    experts = _build_experts(path)
    x = torch.randn(10, 16, requires_grad=True)
    scores, index = torch.rand(10, 6).softmax(-1).topk(3)
    scores.requires_grad_()
    inputs = (x, scores, *experts.parameters())
    wanted, got = experts(x, index, scores), experts_forward(experts, x, index, scores)
    torch.testing.assert_close(got, wanted, **CLOSE)
    upstream = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, inputs, upstream)
    for one, other in zip(torch.autograd.grad(got, inputs, upstream), wanted_grads, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_bfloat16_is_no_worse_than_eager():
    experts = _build_experts("qwen3_moe.Qwen3MoeExperts", torch.bfloat16)
    x = torch.randn(40, 16).bfloat16()
    scores, index = torch.rand(40, 6).softmax(-1).topk(4)
    scores = scores.bfloat16()
    exact = experts.double()(x.double(), index, scores.double())
    experts.bfloat16()
    eager_error = (experts(x, index, scores).double() - exact).abs().mean()
    assert (experts_forward(experts, x, index, scores).double() - exact).abs().mean() <= eager_error


def test_a_model_of_transformers_gives_the_same_logits_and_loss():
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config = transformers.Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.arange(24).view(2, 12) % 50
    model.set_experts_implementation("eager")
    wanted = model(ids, labels=ids)
    ALL_EXPERTS_FUNCTIONS.register("ragged_dot_test", experts_forward)
    try:
        model.set_experts_implementation("ragged_dot_test")
        got = model(ids, labels=ids)
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop("ragged_dot_test", None)
    torch.testing.assert_close(got.logits, wanted.logits, **CLOSE)
    torch.testing.assert_close(got.loss, wanted.loss, **CLOSE)
