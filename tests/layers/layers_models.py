"""Tiny models of real architectures with random weights, also random norm weights: ones and zeros hide mistakes."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def _config(name: str):
    import transformers as t

    if name == "llama":
        return t.LlamaConfig(**SMALL)
    if name == "qwen3_moe":
        return t.Qwen3MoeConfig(**SMALL, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2)
    if name == "mixtral":
        return t.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    if name == "gemma3":
        return t.Gemma3TextConfig(**SMALL, sliding_window=16)
    if name == "gemma4":
        return t.Gemma4TextConfig(
            **SMALL,
            sliding_window=16,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=24,
            global_head_dim=8,
            vocab_size_per_layer_input=97,
            hidden_size_per_layer_input=8,
        )
    if name == "gpt_oss":
        return t.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    raise KeyError(name)


NAMES = ("llama", "qwen3_moe", "mixtral", "gemma3", "gemma4", "gpt_oss")


def tiny(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options):
    torch.manual_seed(seed)
    config = _config(name)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, **options).to(dtype).eval()
    with torch.no_grad():
        for module in model.modules():
            for key, weight in module.named_parameters(recurse=False):
                if "RMSNorm" in type(module).__name__ and key == "weight":
                    weight.add_(torch.randn_like(weight) * 0.3)
                elif weight.dim() > 1:
                    weight.copy_(torch.randn_like(weight) * 0.15)
    return model


def ids(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))
