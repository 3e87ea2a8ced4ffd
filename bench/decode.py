"""Decode with a whole model: Transformers' implementations of the experts against kernelize, one step after the other.

All ways share one set of weights and start from one cache. At every step each of them is given the same token per
sequence, the best one by Transformers' own loop, so that all route alike and their logits can be compared.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pallas_hub.bench.decode_models import DecodeModel
from pallas_hub.bench.machine import available_memory_bytes
from pallas_hub.bench.timing import Timing, _rounds, wait_for

REFERENCE = "Transformers eager"
OURS = "kernelize"
TRANSFORMERS = ("eager", "batched_mm", "grouped_mm")


@dataclass
class Way:
    """A model that decodes in one way, and what came of it at one batch size."""

    name: str
    model: Any
    ours: bool = False
    default: bool = False  # what Transformers decodes with if nobody chooses
    gathers: bool = False  # copies the weights of every pair of token and expert
    cache: Any = None
    first_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    heads_s: list[float] = field(default_factory=list)
    agreement: Agreement | None = None
    skipped: str | None = None
    error: str | None = None

    def fresh(self) -> Way:
        return Way(self.name, self.model, self.ours, self.default, self.gathers)

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def timing(self) -> Timing | None:
        if self.failed or self.skipped or len(self.steps_s) < 2:
            return None
        return Timing(self.name, self.first_s, tuple(self.steps_s), 1, cold=False)


@dataclass
class Agreement:
    """How the logits of one way compare with those of Transformers' loop, over all steps and sequences."""

    errors: list[float] = field(default_factory=list)  # largest difference over largest logit, of each choice
    ties: list[float] = field(default_factory=list)  # where another token came out best: how far ahead, likewise

    @property
    def same_tokens(self) -> int:
        return len(self.errors) - len(self.ties)

    def problem(self, tolerance: float) -> str | None:
        """What is wrong, or None.

        A choice of experts that is all but a tie may fall either way after rounding, and changes a few choices by more
        than rounding does; so the tolerance is for the median, and ten times of it for the worst.
        """
        ordered = sorted(self.errors)
        median, worst = ordered[len(ordered) // 2], ordered[-1]
        if not median <= tolerance:  # also when it is NaN
            return f"logits differ by {median:.1e} in the median, tolerance {tolerance:.1e}"
        if not worst <= 10 * tolerance:
            return f"logits differ by {worst:.1e} at worst, tolerance {10 * tolerance:.1e}"
        return None


@dataclass
class DecodeResult:
    """One table: a model at one batch size."""

    batch: int
    prompt: int
    steps: int
    hit: float  # experts with a token, mean of the layers
    tolerance: float
    ways: list[Way]

    @property
    def failed(self) -> bool:
        return any(way.failed for way in self.ways)

    def way(self, name: str) -> Way | None:
        return next((way for way in self.ways if way.name == name), None)

    @property
    def default(self) -> Way | None:
        return next((way for way in self.ways if way.default), None)

    @property
    def fastest_other(self) -> Way | None:
        timed = [(way.timing.median_s, way) for way in self.ways if not way.ours and way.timing]
        return min(timed, key=lambda pair: pair[0], default=(0.0, None))[1]

    def ratio(self, other: Way | None, stretch: float = 1.0) -> float | None:
        """How many times as long a step of the other way takes; with all layers but the head `stretch` times."""
        ours = self.way(OURS)
        if ours is None or other is None or ours.timing is None or other.timing is None:
            return None
        return _step_s(other, stretch) / _step_s(ours, stretch)


def _step_s(way: Way, stretch: float) -> float:
    head = statistics.median(way.heads_s)
    return head + stretch * (statistics.median(way.steps_s) - head)


def tolerance_for(dtype: Any, layers: int) -> float:
    """Of the logits, relative to the largest: a few roundings to `dtype` in each layer, which add up at random."""
    import torch

    return 2 * torch.finfo(dtype).eps * layers**0.5 + 64 * torch.finfo(torch.float32).eps


def make_ways(model: Any, prompt: Any, choose: dict[str, Any], device_type: str) -> tuple[list[Way], list[str]]:
    """A copy of the model for each way, on the same weights, and where our kernels come from."""
    import pallas_hub
    from pallas_hub.layers.experts import is_experts
    from pallas_hub.layers.loading import DEFAULT_REPOS, EXPERTS

    default = model.config._experts_implementation
    if device_type != "cpu" and default == "grouped_mm":
        default = "batched_mm"  # what generate() switches to for decoding
    ways = []
    for implementation in TRANSFORMERS:
        twin = _twin(model)
        twin.set_experts_implementation(implementation)
        is_default = implementation == default
        ways.append(
            Way(f"Transformers {implementation}", twin, default=is_default, gathers=implementation == "batched_mm")
        )
    sources: list[str] = []
    others = {kind: None for kind in DEFAULT_REPOS if kind != EXPERTS}
    for name, kinds in ((OURS, choose), (f"{OURS}, experts only", {**choose, **others})):
        twin = _twin(model)
        twin.set_experts_implementation("eager")  # what verify compares with
        report = pallas_hub.kernelize(twin, kernels=kinds, verify={"input_ids": prompt}, strict=True)
        for path, module in twin.named_modules():
            if is_experts(module) and not report[path].swapped:
                raise ValueError(f"kernelize left the experts {path} alone: {report[path].reason}.")
        sources += [f"{row.kernel} v{row.version} from {row.source}, runs {row.runs}" for row in report.swapped]
        ways.append(Way(name, twin, ours=True))
    return ways, list(dict.fromkeys(sources))


def _twin(model: Any) -> Any:
    """Another model on the same weights."""
    return copy.deepcopy(model, {id(weight): weight for weight in (*model.parameters(), *model.buffers())})


def prompt_of(model: Any, batch: int, length: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)
    return ids.to(model.device)


def decode(
    ways: Sequence[Way], chosen: DecodeModel, prompt: Any, steps: int, tolerance: float, everything: bool = True
) -> DecodeResult:
    """Time `steps` steps of every way, interleaved, after one more that warms up and is checked first.

    Without `everything` a way that copies weights is left out, on a CPU, where it would copy more than all of them.
    """
    import torch

    batch, length = prompt.shape
    ways = [way.fresh() for way in ways]
    reference = next(way for way in ways if way.name == REFERENCE)
    with torch.no_grad():
        start = reference.model.base_model(input_ids=prompt, use_cache=True)
        # The model's own way to keep the last logits of many hands strided rows to the head: copies of it, on a CPU.
        last = start.last_hidden_state[:, -1].contiguous()
        tokens = reference.model.get_output_embeddings()(last).argmax(-1, keepdim=True)
        for way in ways:
            way.skipped = _why_not(way, chosen, batch, everything)
            way.cache = copy.deepcopy(start.past_key_values)
            way.agreement = Agreement()
        hit = _experts_hit(reference, tokens)
        running = [way.name for way in ways if not way.skipped]
        by_name = {way.name: way for way in ways}
        for step, order in enumerate(_rounds(running, steps + 1)):
            logits = {}
            for name in order:
                if not by_name[name].failed:
                    logits[name] = _take_step(by_name[name], tokens, warm_up=step == 0)
            wanted = logits[REFERENCE]
            for name, came in logits.items():
                way = by_name[name]
                if came is not None and not way.failed:
                    _compare(way, came, wanted, tolerance)
            tokens = wanted.argmax(-1, keepdim=True).to(prompt.device)
    for way in ways:
        way.cache = None
    return DecodeResult(batch, length, steps, hit, tolerance, ways)


def _why_not(way: Way, chosen: DecodeModel, batch: int, everything: bool) -> str | None:
    if not way.gathers:
        return None
    pairs = batch * chosen.top_k
    if pairs > chosen.experts and not everything and way.model.device.type == "cpu":
        return f"copies the weights of {pairs} pairs of token and expert in every layer; --all measures it"
    need, available = pairs * chosen.expert_parameters * way.model.dtype.itemsize, available_memory_bytes()
    if available is None or need <= 0.8 * available:
        return None
    return f"needs {need / 2**30:.1f} GiB more memory; {available / 2**30:.1f} GiB are free"


def _experts_hit(way: Way, tokens: Any) -> float:
    """In one step that is not measured, on a copy of the cache: how many experts of a layer have a token."""
    from pallas_hub.layers.experts import is_experts

    counts: list[int] = []
    experts = [module for module in way.model.modules() if is_experts(module)]
    hooks = [
        module.register_forward_pre_hook(lambda _, args: counts.append(args[1].unique().numel())) for module in experts
    ]
    try:
        way.model(input_ids=tokens, past_key_values=copy.deepcopy(way.cache), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts) / len(counts)


def _take_step(way: Way, tokens: Any, warm_up: bool) -> Any:
    """One token for each sequence: float32 logits on the CPU, or None if it failed."""
    head = way.model.get_output_embeddings()
    began: list[float] = []
    hooks = [
        head.register_forward_pre_hook(lambda _, args: began.append(_now(args))),
        head.register_forward_hook(lambda _, args, result: began.append(_now(result))),
    ]
    try:
        start = time.perf_counter()
        result = way.model(input_ids=tokens, past_key_values=way.cache, use_cache=True)
        seconds = _now(result.logits) - start
    except Exception as error:  # whatever it is, it is this way's result and not the end of the benchmark
        way.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return None
    finally:
        for hook in hooks:
            hook.remove()
    if warm_up:
        way.first_s = seconds
    else:
        way.steps_s.append(seconds)
        way.heads_s.append(began[1] - began[0])
    return result.logits[:, -1].float().cpu()


def _now(result: Any) -> float:
    wait_for(result)
    return time.perf_counter()


def _compare(way: Way, came: Any, wanted: Any, tolerance: float) -> None:
    assert way.agreement is not None
    scale = wanted.abs().amax(-1).clamp_min(1e-30)
    way.agreement.errors += ((came - wanted).abs().amax(-1) / scale).tolist()
    best, chosen = wanted.amax(-1), wanted.gather(-1, came.argmax(-1, keepdim=True)).squeeze(-1)
    differs = came.argmax(-1) != wanted.argmax(-1)
    way.agreement.ties += ((best - chosen) / scale)[differs].tolist()
    problem = way.agreement.problem(tolerance)
    if problem is not None:
        way.error = f"check failed: {problem}"
