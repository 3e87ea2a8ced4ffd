"""A tiny model of each kind with random weights, and what it computes under one implementation or another."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from default_kernels import record_paths
from moe_models import Case
from tiny_config import WORDS, tiny_config
from torch import Tensor, nn

import pallas_hub
from pallas_hub.layers.experts import is_experts

LARGEST = 2_000_000  # parameters: a size that was not made small is a mistake in tiny_config.py

# What cannot be built, by the name of the case, and why. Checked: an entry that can be built is an error.
NOT_BUILT: dict[str, str] = {}

# What has no generate() to compare, and why. Checked likewise.
NOT_GENERATING = {"openai_privacy_filter": "it classifies tokens"}

# Models that take embeddings only: their tokens are mixed of several codes.
EMBEDDINGS_ONLY = ("Qwen3OmniMoeTalkerForConditionalGeneration",)


class NotBuilt(Exception):
    """None of the file's models could be built with these experts in it."""


@dataclass
class Run:
    """What one forward and backward pass gave."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    routing: list[tuple[nn.Module, Tensor]]  # each call of experts, with its top_k_index
    ran: list[str]  # the kernel calls of the forward pass


@dataclass
class Generated:
    tokens: Tensor
    logits: Tensor | None  # that they were chosen by, of models that give them
    calls: int  # of experts
    ran: list[str]


@dataclass
class Built:
    case: Case
    model: Any
    runs: dict[str, Run] = field(default_factory=dict)
    generated: dict[str, Generated] = field(default_factory=dict)

    @property
    def experts(self) -> list[Any]:
        return [module for module in self.model.modules() if is_experts(module)]

    @contextlib.contextmanager
    def under(self, way: str) -> Generator[None]:
        """eager: Transformers' own loop; setting: experts_implementation="pallas"; kernelize: pallas_hub.kernelize."""
        with under(self.model, way):
            yield

    def run(self, way: str) -> Run:
        """In float32 and in training mode; computed once."""
        if way not in self.runs:
            with self.under(way):
                self.runs[way] = run(self.model.train(), words(2, 9))
        return self.runs[way]

    def generate(self, way: str) -> Generated:
        """32 tokens, the best one each time; computed once."""
        if way not in self.generated:
            with self.under(way):
                self.generated[way] = generate(self.model.eval())
        return self.generated[way]


def build(case: Case) -> Built:
    """The best class of the file that has these experts in it, built with experts_implementation="pallas"."""
    reasons = []
    for cls in case.model_classes:
        try:
            config = tiny_config(cls.config_class)
            with torch.device("meta"):
                sketch = cls(copy.deepcopy(config))
        except Exception as error:
            reasons.append(f"{cls.__name__}: {type(error).__name__}: {error}")
            continue
        if not any(isinstance(module, case.experts_class) for module in sketch.modules()):
            reasons.append(f"{cls.__name__}: has no {case.experts}")
            continue
        size = sum(parameter.numel() for parameter in sketch.parameters())
        if size > LARGEST:
            reasons.append(f"{cls.__name__}: {size} parameters are not tiny")
            continue
        model = cls._from_config(config, experts_implementation="pallas")  # what Auto...from_config calls
        return Built(case, _with_random_weights(model))
    raise NotBuilt(f"{case}: " + "; ".join(reasons))


def _with_random_weights(model: nn.Module) -> nn.Module:
    """Large enough for experts to matter; what Transformers starts from hides mistakes behind the residual stream."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model


def words(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(1, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def under(model: Any, way: str) -> Generator[None]:
    before = model.get_experts_implementation()
    model.set_experts_implementation("pallas" if way == "setting" else "eager")
    try:
        if way == "kernelize":
            pallas_hub.kernelize(model)
        yield
    finally:
        if way == "kernelize":
            pallas_hub.unkernelize(model)
        model.set_experts_implementation(before)


def inputs_of(model: Any, ids: Tensor) -> dict[str, Tensor]:
    if type(model).__name__ in EMBEDDINGS_ONLY:
        return {"inputs_embeds": model.get_input_embeddings()(ids)}
    return {"input_ids": ids}


def run(model: Any, ids: Tensor) -> Run:
    torch.manual_seed(0)  # some add noise to their routers in training, one draws its first tokens
    model.zero_grad(set_to_none=True)
    with routing_of(model) as routing:
        with record_paths() as ran:
            output = model(**inputs_of(model, ids), **_labels_of(model, ids))
        loss = output.loss if getattr(output, "loss", None) is not None else output.logits.square().mean()
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Run(output.logits.detach(), loss.detach(), gradients, list(routing), [op for op, _ in ran])


def _labels_of(model: Any, ids: Tensor) -> dict[str, Tensor]:
    if type(model).__name__ in EMBEDDINGS_ONLY or "labels" not in inspect.signature(model.forward).parameters:
        return {}
    return {"labels": ids % model.num_labels if "Classification" in type(model).__name__ else ids}


@contextlib.contextmanager
def routing_of(model: nn.Module) -> Generator[list[tuple[nn.Module, Tensor]]]:
    """Collect each call of experts inside, with its top_k_index."""
    calls: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: tuple) -> None:
        calls.append((module, args[1].clone()))

    hooks = [module.register_forward_pre_hook(note) for module in model.modules() if is_experts(module)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def generate(model: Any) -> Generated:
    torch.manual_seed(0)
    inputs = inputs_of(model, words(2, 5))
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "use_cache": True}
    if type(model).__name__ in EMBEDDINGS_ONLY:
        width = inputs["inputs_embeds"].shape[-1]
        options |= {"trailing_text_hidden": torch.zeros(2, 1, width), "tts_pad_embed": torch.zeros(1, 1, width)}
        options |= {"output_hidden_states": True}
    if hasattr(model.generation_config, "max_denoising_steps"):
        options |= {"max_denoising_steps": 4}  # of each block of tokens; it has no output_logits
    else:
        options |= {"pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad(), routing_of(model) as calls, record_paths() as ran:
        output = model.generate(**inputs, **options)
    logits = None if output.logits is None else torch.stack(output.logits)
    return Generated(output.sequences, logits, len(calls), [op for op, _ in ran])
