"""The main job, end to end, on this machine: two kernels from source to a Hub repo to a verified, measured MoE model.

Nothing leaves the machine: the Hub is a loopback server over a temporary folder, and so are the caches. Each step says
what it did and checks it; the first failed check ends the run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

KERNELS = ("rms-norm", "ragged-dot")
ORGANISATION = "pallas-hub"
# Settings that would make the demo do something else than it says.
_UNSET = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "LOCAL_KERNELS",
    "KERNELS_CACHE",
    "DISABLE_KERNEL_MAPPING",
    "PALLAS_HUB_PATH",
    "PALLAS_HUB_INTERPRET",
    # With telemetry off, kernels 0.17.2 sends a header that no HTTP client accepts. The only Hub here is our own.
    "HF_HUB_DISABLE_TELEMETRY",
    "DISABLE_TELEMETRY",
    "DO_NOT_TRACK",
)


class StepFailed(RuntimeError):
    """A step's check did not hold."""


@dataclass
class Step:
    """What one step did: facts for machines, lines for people."""

    title: str
    passed: bool = False
    seconds: float = 0.0
    headline: str = ""  # the one result worth repeating in the summary
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Demo:
    """State handed from step to step."""

    say: Callable[[str], None]
    folder: Path
    stack: ExitStack
    workload: str = "qwen3-30b-a3b"  # what to time
    seconds: float = 2.0  # timing budget per table
    tokens: tuple[int, ...] = (1, 8, 64)
    url: str = ""
    kernels: dict[str, ModuleType] = field(default_factory=dict)


def run(say: Callable[[str], None] = print, **options: Any) -> list[Step]:
    """Run every step in order; stops after the first that fails. Needs a process that has not used a Hub before."""
    _refuse_a_used_process()
    steps: list[Step] = []
    with tempfile.TemporaryDirectory(prefix="pallas-hub-demo-") as folder, ExitStack() as stack:
        demo = Demo(say, Path(folder), stack, **options)
        for number, action in enumerate(STEPS, 1):
            step = Step((action.__doc__ or "").splitlines()[0].rstrip("."))
            steps.append(step)
            say(f"[{number}/{len(STEPS)}] {step.title}")
            if not _attempt(demo, step, action):
                break
            say(f"      done in {step.seconds:.1f} s\n")
    return steps


def _attempt(demo: Demo, step: Step, action: Callable[[Demo, Step], None]) -> bool:
    start = time.perf_counter()
    try:
        action(demo, step)
        step.passed = True
    except Exception as error:
        step.error = f"{error}" if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
        demo.say(f"      FAILED: {step.error}")
    step.seconds = time.perf_counter() - start
    return step.passed


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StepFailed(otherwise)


def _refuse_a_used_process() -> None:
    """huggingface_hub reads HF_ENDPOINT once, when it is imported."""
    if "huggingface_hub" in sys.modules:
        raise RuntimeError(
            "demo: huggingface_hub was imported before the demo could point it to its own Hub. Run `pallas-hub demo` "
            "or call pallas_hub.demo.run() in a fresh process."
        )


# --- the steps ---------------------------------------------------------------------------------------------------


def start_hub(demo: Demo, step: Step) -> None:
    """Start a Hub on loopback, in a temporary folder"""
    from pallas_hub.registry.server import running_hub

    demo.url = demo.stack.enter_context(running_hub(demo.folder / "store", trusted=(ORGANISATION,))).url
    for name in _UNSET:
        os.environ.pop(name, None)
    os.environ["HF_ENDPOINT"] = demo.url
    os.environ["HF_HOME"] = str(demo.folder / "hf")
    os.environ["HF_HUB_CACHE"] = str(demo.folder / "hf" / "hub")
    os.environ["PALLAS_HUB_CACHE"] = str(demo.folder / "cache")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    step.facts["url"] = demo.url
    demo.say(f"      {demo.url}; HF_ENDPOINT and the caches point there for the rest of this process")


def publish_kernels(demo: Demo, step: Step) -> None:
    """Build both kernels and publish them"""
    from pallas_hub.registry.build import build
    from pallas_hub.registry.publish import publish

    for name in KERNELS:
        first, second = (build(name, demo.folder / place / name) for place in ("first", "second"))
        _require(_bytes_of(first.path) == _bytes_of(second.path), f"{name}: two builds of the same source differ")
        done = publish(name, ORGANISATION, endpoint=demo.url, token="demo")
        if done.commit is None:
            raise StepFailed(f"{name}: nothing was published to an empty Hub")
        step.facts[name] = {"repo": done.repo_id, "branch": done.branch, "commit": done.commit, **first.digests}
        variants = ", ".join(sorted(first.digests))
        demo.say(f"      {done.repo_id} {done.branch}, commit {done.commit[:12]}: {variants}; built twice, same bytes")


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def load_kernels(demo: Demo, step: Step) -> None:
    """Load them as a user does, with the kernels library and with pallas_hub"""
    import kernels
    import pallas_hub
    from pallas_hub.registry.errors import NotTrusted

    for name in KERNELS:
        repo = f"{ORGANISATION}/{name}"
        theirs = kernels.get_kernel(repo, version=1, trust_remote_code=True)
        demo.say(f"      kernels.get_kernel({repo!r}, version=1) -> {', '.join(theirs.__all__)}")
        try:
            ours = pallas_hub.get_kernel(repo)
        except NotTrusted:
            demo.say("      (these sources are not the released ones, so pallas_hub asks for consent; it is given)")
            ours = pallas_hub.get_kernel(repo, trust_remote_code=[repo])
        origin = pallas_hub.loaded_from(ours)
        _require(origin.source == "hub", f"{repo} was loaded from {origin.source}, not from the Hub")
        commit = str(origin.commit)[:12]
        demo.say(f"      pallas_hub.get_kernel({repo!r}) -> v{origin.version}, {origin.variant}, commit {commit}")
        demo.say(f"        from the {origin.source}; trusted because: {origin.trust}")
        demo.kernels[name] = ours
        step.facts[name] = {"version": origin.version, "variant": origin.variant, "commit": origin.commit}


def check_kernels(demo: Demo, step: Step) -> None:
    """Check values and gradients against float64"""
    for label, got, exact, tolerance in [*_norm_checks(demo), *_experts_checks(demo)]:
        _compare(demo, step, label, got, exact, tolerance)


def check_interpreted(demo: Demo, step: Step) -> None:
    """Run the Pallas TPU kernels themselves, interpreted on the CPU, and check them too"""
    from pallas_hub.bench.loading import record_paths_of

    os.environ["PALLAS_HUB_INTERPRET"] = "1"
    try:
        with ExitStack() as stack:
            ran = [stack.enter_context(record_paths_of(kernel)()) for kernel in demo.kernels.values()]
            for label, got, exact, tolerance in [*_norm_checks(demo, m=12, n=256), *_experts_checks(demo, tokens=3)]:
                _compare(demo, step, f"{label}, interpreted", got, exact, tolerance)
    finally:
        del os.environ["PALLAS_HUB_INTERPRET"]
    for name, calls in zip(demo.kernels, ran, strict=True):
        paths = {path for _, path in calls}
        _require("interpret" in paths, f"{name}: the Pallas kernel did not run; paths taken: {paths or 'none'}")


def _compare(demo: Demo, step: Step, label: str, got: Any, exact: Any, tolerance: float) -> None:
    from pallas_hub.bench.checks import compare

    check = compare(got, exact, tolerance)
    step.facts[label] = {"error": check.error, "tolerance": tolerance}
    _require(check.passed, f"{label}: {check.problem}")
    demo.say(f"      {label}: largest error {check.error:.1e} (allowed {tolerance:.1e})")


def _norm_checks(demo: Demo, m: int = 64, n: int = 2048) -> Iterator[tuple[str, Any, Any, float]]:
    """(label, result, exact result, tolerance) of rms_norm and of its gradient for x."""
    import torch

    from pallas_hub.bench.checks import tolerance_for
    from pallas_hub.bench.workloads.rms_norm import EPS, exact_rms_norm

    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(m, n, generator=generator).to(dtype).requires_grad_()
        weight = (1 + 0.1 * torch.randn(n, generator=generator)).to(dtype)
        wide = x.detach().double().requires_grad_()
        y, exact = demo.kernels["rms-norm"].rms_norm(x, weight, EPS), exact_rms_norm(wide, weight)
        upstream = torch.randn(m, n, generator=generator).to(dtype)
        (gradient,) = torch.autograd.grad(y, x, upstream)
        (exact_gradient,) = torch.autograd.grad(exact, wide, upstream.double())
        name, tolerance = f"rms_norm ({m}, {n}) {str(dtype).removeprefix('torch.')}", tolerance_for(dtype, n)
        yield name, y, exact.detach(), tolerance
        yield f"{name} gradient", gradient, exact_gradient, tolerance


def _experts_checks(demo: Demo, tokens: int = 33) -> Iterator[tuple[str, Any, Any, float]]:
    """(label, result, exact result, tolerance) of a small experts layer."""
    import torch

    from pallas_hub.bench.workloads import ragged_dot as workload

    for dtype in ("float32", "bfloat16"):
        (case,) = workload.cases(demo.kernels["ragged-dot"], "small", [dtype], [tokens])
        ours = next(item for item in case.implementations if item.ours)
        with torch.no_grad():
            yield f"moe_experts ({tokens} tokens) {dtype}", ours.call(), case.exact(), case.tolerance


def swap_model(demo: Demo, step: Step) -> None:
    """Swap the layers of a Qwen3-MoE model, verify them, and put everything back"""
    import torch

    import pallas_hub

    model, tokens = _small_model()
    with torch.no_grad():
        before = model(tokens).logits
        report = pallas_hub.kernelize(model, kernels=dict(_kinds(demo)), verify={"input_ids": tokens})
        after = model(tokens).logits
        demo.say(_indent(str(pallas_hub.explain(model)), most=8))
        _require(len(report.swapped) == len(report.layers), f"{len(report.left_alone)} layers were left alone")
        if (worst := report.largest_error) is None:
            raise StepFailed("kernelize(verify=...) measured no layer")
        demo.say(f"      largest error of a layer on its own inputs: {worst.max_rel_error:.1e} in {worst.path}")
        error = ((after - before).abs().max() / before.abs().max()).item()
        same = (after.argmax(-1) == before.argmax(-1)).float().mean().item()
        demo.say(f"      logits before and after: largest difference {error:.1e}, same next token at {same:.0%}")
        # Both run in float32; layers apart by 1e-6 (a few roundings) can add up over the depth, more is a mistake.
        _require(error < 1e-4, f"the logits of the swapped model are off by {error:.1e}")
        pallas_hub.unkernelize(model)
        _require(torch.equal(model(tokens).logits, before), "unkernelize did not restore the model")
    demo.say("      unkernelize: the same logits as at first, bit for bit")
    step.headline = f"{len(report.swapped)} layers swapped, logits within {error:.0e}, restored bit for bit"
    step.facts |= {"swapped": len(report.swapped), "logits_error": error, "same_next_token": same}


def _kinds(demo: Demo) -> Iterator[tuple[str, ModuleType]]:
    """The modules loaded above: whichever way consent was given, the same kernels serve the model."""
    yield "RMSNorm", demo.kernels["rms-norm"]
    yield "experts", demo.kernels["ragged-dot"]


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
        if case.sizes["tokens"] > 8:
            # It copies the weights of every token's experts: seconds per call at 64 tokens, and never the fastest.
            case.implementations = [item for item in case.implementations if "batched_mm" not in item.name]
            case.unavailable["Transformers batched_mm"] = (
                "takes seconds per call at this size; `pallas-hub bench` has it"
            )
        results.append(run_case(case, seconds=demo.seconds, record_paths=record_paths_of(kernel)))
    demo.say(_indent(report.text(about, results)))
    step.facts |= report.to_json(about, results)
    _require(not any(result.failed for result in results), "a check failed, see the table")
    step.headline = _speeds(results)


def _speeds(results: list[Any]) -> str:
    """How our row did in each table, whatever the outcome."""
    parts = []
    for result in results:
        ours = next(row for row in result.rows if row.ours)
        best = result.best_other(ours)
        if ours.timing and best:
            against = f"{result.speed(ours):.2f} x the best other ({best[0].name})"
            parts.append(f"{result.case.sizes['tokens']} tokens: {against}, {result.share(ours):.0%} of the bandwidth")
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
            _require("tpu_custom_call" in compiled.as_text(), f"{name} for {target}: no Pallas kernel in the result")
        demo.say(f"      {name}: compiled for {', '.join(TARGETS)}")
    step.headline = f"{len(step.facts)} programs compiled, none run"


def _tpu_programs(demo: Demo) -> Iterator[tuple[str, Callable, list[Any], dict[str, Any]]]:
    """(name, JAX function, argument shapes, static arguments): the kernels as loaded, at model sizes."""
    import importlib

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


def _indent(text: str, most: int | None = None) -> str:
    lines = text.splitlines()
    if most is not None and len(lines) > most:
        lines = [*lines[:most], f"... and {len(lines) - most} more"]
    return "\n".join(f"      {line}" for line in lines)


STEPS = (
    start_hub,
    publish_kernels,
    load_kernels,
    check_kernels,
    check_interpreted,
    swap_model,
    time_layer,
    compile_for_tpus,
)
