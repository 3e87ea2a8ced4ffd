"""Models to decode with: the layers of real mixture-of-experts models, fewer of them, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallas_hub.bench.machine import available_memory_bytes


@dataclass(frozen=True)
class DecodeModel:
    """A causal language model of Transformers, at any depth."""

    title: str
    depth: int  # layers of the real model
    config: Callable[[int], Any]  # number of layers -> configuration
    experts: int
    top_k: int
    expert_parameters: int  # of one expert

    def describe(self, layers: int) -> str:
        return (
            f"{self.title}, {layers} of {self.depth} layers"
            if layers < self.depth
            else f"{self.title}, {layers} layers"
        )


def _qwen3(layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    more: dict[str, Any] = {"head_dim": 128}  # which the class has no field for
    return Qwen3MoeConfig(
        num_hidden_layers=layers,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **more,
    )


def _gemma4(layers: int) -> Any:
    from transformers import Gemma4TextConfig

    more: dict[str, Any] = {"global_head_dim": 512, "num_global_key_value_heads": 2}
    return Gemma4TextConfig(
        num_hidden_layers=layers,
        hidden_size=2816,
        intermediate_size=2112,  # of the dense part, which every layer has beside its experts
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        attention_k_eq_v=True,
        # One in six layers of the real model looks at everything; the last always does.
        layer_types=[
            "full_attention" if (i + 1) % 6 == 0 or i == layers - 1 else "sliding_attention" for i in range(layers)
        ],
        sliding_window=1024,
        final_logit_softcapping=30.0,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        vocab_size=262144,
        **more,
    )


def _small(layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    more: dict[str, Any] = {"head_dim": 32}
    return Qwen3MoeConfig(
        num_hidden_layers=layers,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        vocab_size=512,
        **more,
    )


MODELS = {
    "qwen3-30b-a3b": DecodeModel("Qwen3-30B-A3B", 48, _qwen3, 128, 8, 3 * 2048 * 768),
    "gemma4-26b-a4b": DecodeModel("Gemma 4 26B-A4B", 30, _gemma4, 128, 8, 3 * 2816 * 704),
    "small": DecodeModel("a small Qwen3 model", 4, _small, 16, 4, 3 * 128 * 64),
}
DEFAULT_MODEL = "qwen3-30b-a3b"


def build(chosen: DecodeModel, layers: int, dtype: Any, device: str) -> Any:
    """The model with random weights, ready to decode."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"):
        sketch = AutoModelForCausalLM.from_config(chosen.config(layers), dtype=dtype)
    _check_memory(chosen, layers, dtype, sum(p.numel() for p in sketch.parameters()) * dtype.itemsize)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(chosen.config(layers), dtype=dtype)
    _draw_weights(model)
    return model.to(device).requires_grad_(False).eval()


def _check_memory(chosen: DecodeModel, layers: int, dtype: Any, need: int) -> None:
    available = available_memory_bytes()
    if available is not None and need > 0.8 * available:
        raise MemoryError(
            f"{layers} layers of {chosen.title} take {need / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, "
            f"which must be at most 80 % of the {available / 2**30:.1f} GiB of memory that are free. "
            "Choose fewer --layers, --workload small or --dtype bfloat16."
        )


def _draw_weights(model: Any) -> None:
    """Of the size that Transformers starts from.

    Experts are one matrix with its rows in another order for each of them: they compute different things, and drawing
    one is a hundred times faster than drawing all.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # norms and scales
                continue
            drawn = torch.randn(parameter.shape[-2:], generator=generator).mul_(0.02).to(parameter.dtype)
            if parameter.dim() == 2:
                parameter.copy_(drawn)
                continue
            for expert in parameter:
                torch.index_select(drawn, 0, torch.randperm(drawn.shape[0], generator=generator), out=expert)
