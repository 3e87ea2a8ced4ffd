"""`pallas-hub bench decode`: all ways decode the same, what differs is found, and the numbers are what they say."""

from __future__ import annotations

import argparse
import json
import types

import moe_experts
import pytest
import rms_norm
import torch

from pallas_hub.bench import decode, decode_models
from pallas_hub.cli import bench as command
from pallas_hub.layers import use_loader

SMALL = decode_models.MODELS["small"]
NAMES = [
    "Transformers eager",
    "Transformers batched_mm",
    "Transformers grouped_mm",
    "kernelize",
    "kernelize, experts only",
]


@pytest.fixture(autouse=True)
def kernels_from_source():
    def load(repo_id, version):
        return rms_norm if "norm" in repo_id else moe_experts

    with use_loader(load):
        yield


@pytest.fixture(scope="module")
def model():
    return decode_models.build(SMALL, 2, torch.float32, "cpu")


def ways_of(model, **choose):
    return decode.make_ways(model, decode.prompt_of(model, 1, 4), choose, "cpu")[0]


def run(ways, model, batch=2, steps=3, everything=True):
    tolerance = decode.tolerance_for(model.dtype, 2)
    return decode.decode(ways, SMALL, decode.prompt_of(model, batch, 4), steps, tolerance, everything)


def test_all_ways_share_the_weights_and_decode_the_same_tokens(model):
    ways = ways_of(model)
    pointers = {weight.data_ptr() for weight in model.parameters()}
    assert all({weight.data_ptr() for weight in way.model.parameters()} == pointers for way in ways)
    result = run(ways, model)
    assert [way.name for way in result.ways] == NAMES
    assert [way.name for way in result.ways if way.default] == ["Transformers grouped_mm"]
    for way in result.ways:
        assert (len(way.timing.samples_s), len(way.heads_s)) == (3, 3)
        assert all(0 < head < step for head, step in zip(way.heads_s, way.steps_s, strict=True))
        assert (way.agreement.same_tokens, len(way.agreement.errors)) == (8, 8)  # 2 sequences, 3 steps and one before
        assert max(way.agreement.errors) <= 1e-5
    assert 4 <= result.hit <= 8  # of 16 experts, 2 tokens to 4 each


def test_ratios_are_those_of_the_medians_and_stretch_all_but_the_head(model):
    result = run(ways_of(model), model)
    ours, other = result.way("kernelize"), result.default
    ours.steps_s, ours.heads_s = [3.0, 2.0, 4.0], [1.0, 1.0, 1.0]
    other.steps_s, other.heads_s = [7.0, 7.0, 9.0], [1.0, 1.0, 1.0]
    assert result.ratio(other) == pytest.approx(7 / 3)
    assert result.ratio(other, stretch=10) == pytest.approx((1 + 10 * 6) / (1 + 10 * 2))


def test_a_way_that_decodes_something_else_is_not_timed(model):
    ways = ways_of(model)
    mlp = ways[2].model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, result: result * 1.5)
    result = run(ways, model)
    assert [way.name for way in result.ways if way.failed] == ["Transformers grouped_mm"]
    assert result.ways[2].error.startswith("check failed: logits differ by ")
    assert result.ways[2].timing is None
    assert result.failed


def test_a_way_that_raises_is_named_and_the_others_go_on(model):
    ways = ways_of(model)
    ways[1].model.model.forward = types.MethodType(lambda *args, **options: 1 / 0, ways[1].model.model)
    result = run(ways, model)
    assert [way.error for way in result.ways if way.failed] == ["ZeroDivisionError: division by zero"]
    assert sum(way.timing is not None for way in result.ways) == 4


def test_a_kernel_that_is_wrong_is_refused_before_anything_is_timed(model):
    wrong = types.ModuleType("wrong")
    wrong.experts_forward = lambda self, *inputs: moe_experts.experts_forward(self, *inputs) * 1.002
    message = r"kernelize left the experts model\.layers\.0\.mlp\.experts alone: it computes something else than the"
    with pytest.raises(ValueError, match=message):
        ways_of(model, experts=wrong)


def test_a_way_that_copies_more_than_all_weights_is_left_out_on_a_cpu(model):
    skipped = {
        way.name: way.skipped for way in run(ways_of(model), model, batch=5, everything=False).ways if way.skipped
    }
    assert skipped == {
        "Transformers batched_mm": (
            "copies the weights of 20 pairs of token and expert in every layer; --all measures it"
        )
    }


def test_a_model_larger_than_the_memory_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(decode_models, "available_memory_bytes", lambda: 2**30)
    with pytest.raises(MemoryError) as caught:
        decode_models.build(decode_models.MODELS["qwen3-30b-a3b"], 4, torch.bfloat16, "cpu")
    assert str(caught.value) == (
        "4 layers of Qwen3-30B-A3B take 5.8 GiB in bfloat16, which must be at most 80 % of the 1.0 GiB of memory that "
        "are free. Choose fewer --layers, --workload small or --dtype bfloat16."
    )


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma4-26b-a4b"])
def test_the_layers_are_those_of_the_real_models(name):
    chosen = decode_models.MODELS[name]
    config = chosen.config(4)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        sketch = AutoModelForCausalLM.from_config(config)
    experts = [weight for name, weight in sketch.named_parameters() if ".experts." in name]
    assert len(experts) == 8
    assert {weight.shape[0] for weight in experts} == {chosen.experts} == {128}
    assert sum(weight[0].numel() for weight in experts) == 4 * chosen.expert_parameters


def parse(*arguments):
    parser = argparse.ArgumentParser(prog="pallas-hub")
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "decode", "--workload", "small", "--layers", "1", *arguments])


QUICK = ("--batch", "2", "--new-tokens", "2", "--prompt", "3", "--dtype", "float32")


def test_the_command_prints_machine_model_table_and_ratio(capsys):
    assert command.run(parse(*QUICK)) == 0
    out = capsys.readouterr().out
    for part in (
        "measured on CPU",
        "a small Qwen3 model, 1 of 4 layers, random weights, float32",
        "batch 2: 2 tokens after a prompt of 3",
        "Transformers grouped_mm (default)",
        "kernelize (ours)",
        "6 of 6",
        "whole-model decode ratio to the default, Transformers grouped_mm: ",
        " measured with 1 layers, ",
        " extrapolated to 4 (the head once, the rest 4/1x)",
    ):
        assert part in out, out


def test_json_is_the_only_thing_on_stdout(capsys):
    assert command.run(parse(*QUICK, "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["passed"], data["layers"], data["depth"], data["dtype"]) == (True, 1, 4, "float32")
    (batch,) = data["batches"]
    assert [way["name"] for way in batch["ways"]] == NAMES
    assert all(way["status"] == "timed" and way["same_tokens"] == way["choices"] == 6 for way in batch["ways"])
    ratio = batch["ways"][2]["timing"]["median_s"] / batch["ways"][3]["timing"]["median_s"]
    assert batch["ratio_to_default"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "4"), "decode takes --batch, not --tokens, one --dtype, and neither --cold nor --plot."),
        (("--dtype", "float32", "bfloat16"), "decode takes --batch, not --tokens, one --dtype"),
        (
            ("--workload", "huge"),
            "--workload must be one of qwen3-30b-a3b, gemma4-26b-a4b, small for decode; got 'huge'.",
        ),
        (("--new-tokens", "1"), "--new-tokens must be at least 2, to have a median; got 1."),
        (("--device", "nowhere"), "--device nowhere cannot be used here: "),
    ],
)
def test_what_is_refused(arguments, message, capsys):
    assert command.run(parse(*arguments)) == 1
    assert f"pallas-hub bench: {message}" in capsys.readouterr().err
