"""Steps of the demo that put the kernels to use: in a model, against their rivals, and through the TPU compiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from pallas_hub.demo.state import Demo, Step, StepFailed, indent, require


def swap_model(demo: Demo, step: Step) -> None:
    """Swap the layers of a Qwen3-MoE model, verify them, and put everything back"""
    import torch

    import pallas_hub

    model, tokens = _small_model()
    # The modules loaded above: whichever way consent was given, the same kernels serve the model.
    kinds = {"RMSNorm": demo.kernels["rms-norm"], "experts": demo.kernels["ragged-dot"]}
    with torch.no_grad():
        before = model(tokens).logits
        report = pallas_hub.kernelize(model, kernels=kinds, verify={"input_ids": tokens})
        after = model(tokens).logits
        demo.say(indent(str(pallas_hub.explain(model)), most=8))
        alone = [layer for layer in report.left_alone if not layer.original.endswith("Router")]  # these gain on TPUs
        require(not alone, f"{len(alone)} layers were left alone")
        if (worst := report.largest_error) is None:
            raise StepFailed("kernelize(verify=...) measured no layer")
        demo.say(f"      largest error of a layer on its own inputs: {worst.max_rel_error:.1e} in {worst.path}")
        error = ((after - before).abs().max() / before.abs().max()).item()
        same = (after.argmax(-1) == before.argmax(-1)).float().mean().item()
        demo.say(f"      logits before and after: largest difference {error:.1e}, same next token at {same:.0%}")
        # Both run in float32; layers apart by 1e-6 (a few roundings) can add up over the depth, more is a mistake.
        require(error < 1e-4, f"the logits of the swapped model are off by {error:.1e}")
        pallas_hub.unkernelize(model)
        require(torch.equal(model(tokens).logits, before), "unkernelize did not restore the model")
    demo.say("      unkernelize: the same logits as at first, bit for bit")
    step.headline = f"{len(report.swapped)} layers swapped, logits within {error:.0e}, restored bit for bit"
    step.facts |= {"swapped": len(report.swapped), "logits_error": error, "same_next_token": same}


def _small_model() -> tuple[Any, Any]:
    """A Qwen3-MoE model with the real layout and random weights, small enough for any machine; and token ids."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    return model, torch.randint(0, config.vocab_size, (2, 24))


def time_layer(demo: Demo, step: Step) -> None:
    """Time one experts layer of a real model in bfloat16 against what Transformers offers"""
    from pallas_hub.bench import machine, report
    from pallas_hub.bench.loading import record_paths_of
    from pallas_hub.bench.runner import run_case
    from pallas_hub.bench.workloads import ragged_dot as workload

    about, kernel, results = machine.describe_machine(), demo.kernels["ragged-dot"], []
    for case in workload.cases(kernel, demo.workload, ["bfloat16"], demo.tokens):
        demo.say(f"      {case.title}: checking and timing")
        for item in [item for item in case.implementations if item.memory_bytes > 2 * case.least_bytes]:
            # batched_mm copies the weights of every token's experts; at 64 tokens a single call takes a second or more.
            case.implementations.remove(item)
            copied = f"copies {item.memory_bytes / 1e9:.1f} GB of weights per call at this size"
            case.unavailable[item.name] = f"{copied}; `pallas-hub bench ragged-dot` times it"
        results.append(run_case(case, seconds=demo.seconds, record_paths=record_paths_of(kernel)))
    demo.say(indent(report.text(about, results)))
    step.facts |= report.to_json(about, results)
    require(not any(result.failed for result in results), "a check failed, see the table")
    step.headline = _speeds(results)


def _speeds(results: list[Any]) -> str:
    """How our row did in each table, whatever the outcome."""
    parts = []
    for result in results:
        ours = next(row for row in result.rows if row.ours)
        best = result.best_other(ours)
        if ours.timing and best:
            against = f"{result.speed(ours):.2f} x the best other ({best[0].name})"
            tokens = result.case.sizes["tokens"]
            share = f"{result.share(ours):.0%} of the bandwidth of a plain read"
            parts.append(f"{tokens} token{'s' * (tokens > 1)}: {against}, {share}")
    return "; ".join(parts)


def compile_for_tpus(demo: Demo, step: Step) -> None:
    """Compile the Pallas kernels for real TPUs with libtpu (compiled, not run)"""
    from pallas_hub.bench.tpu_compile import TARGETS, LibtpuMissing, compile_for_tpu

    for name, function, arguments, static in _tpu_programs(demo):
        for target in TARGETS:
            try:
                compiled = compile_for_tpu(function, *arguments, target=target, **static)
            except LibtpuMissing as error:
                step.facts["skipped"] = str(error)
                demo.say(f"      skipped: {error}")
                return
            step.facts[f"{name} {target}"] = "compiled"
            require("tpu_custom_call" in compiled.as_text(), f"{name} for {target}: no Pallas kernel in the result")
        demo.say(f"      {name}: compiled for {', '.join(TARGETS)}")
    step.headline = f"{len(step.facts)} programs compiled, none run"


def _tpu_programs(demo: Demo) -> Iterator[tuple[str, Callable, list[Any], dict[str, Any]]]:
    """(name, JAX function, argument shapes, static arguments): the kernels as loaded, at model sizes."""
    import jax

    def shaped(dtype: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))

    norm = importlib.import_module(f"{demo.kernels['rms-norm'].__name__}.kernel")
    x, weight = shaped("bfloat16", 512, 2048), shaped("bfloat16", 2048)
    yield "rms_norm forward, (512, 2048) bfloat16", norm.rms_norm_forward, [x, weight], {"eps": 1e-6}
    yield "rms_norm backward, (512, 2048) bfloat16", norm.rms_norm_backward, [x, weight, x], {"eps": 1e-6}
    dot = importlib.import_module(f"{demo.kernels['ragged-dot'].__name__}.kernel")
    lhs, rhs, sizes = shaped("bfloat16", 512, 2048), shaped("bfloat16", 128, 1536, 2048), shaped("int32", 128)
    name = "ragged_dot, (512, 2048) x 128 of (1536, 2048) bfloat16"
    yield name, dot.ragged_dot_forward, [lhs, rhs, sizes], {"transpose_rhs": True}
