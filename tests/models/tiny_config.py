"""A tiny configuration for any model: the class's own defaults, with every size made small by its name.

Sizes that depend on each other by a rule of one model only are in CHANGES, each with that rule.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 96
WORDS = 64  # ids below are words; placeholders of images and the like get ids from the top

# First pattern that fits the whole name -> largest value. A default of None means "derived": only these are set then.
NEEDED = {
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts": 8,
    r"num_experts_per_tok|moe_k|moe_topk": 2,
}
SIZES = {
    **NEEDED,
    r".*vocab_size.*": VOCABULARY,
    r"num_hidden_layers|encoder_layers|decoder_layers|depth": 2,
    r"first_k_dense_replace|num_dense_layers": 1,
    r"n_groups?": 2,
    r"topk_group": 1,
    r".*num_(attention_|key_value_|key_|value_)?heads|.*_attention_heads|index_n_heads": 4,
    r".*hidden_size.*|d_model|.*output_dim": 32,
    r".*intermediate_size|.*ffn_dim|mlp_dim": 24,
    r".*head_dim": 8,
    r".*lora_?rank": 16,
    r"max_position_embeddings": 128,
    r".*sliding_window(_size)?|.*chunk_size|block_size|canvas_length|index_topk": 8,
    r"num_code_groups": 3,
}

# Where a model's own rules want more than a small number. By class of configuration; each with the rule.
CHANGES: dict[str, dict[str, Any]] = {
    # Sizes that must be given for the model to have experts at all.
    "DiffusionGemmaTextConfig": {"top_k_experts": 2, "moe_intermediate_size": 24, "global_head_dim": 8},
    "Dots1Config": {"n_shared_experts": 1},
    "Gemma4TextConfig": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "global_head_dim": 8,
    },
    "HunYuanMoEV1Config": {"head_dim": 8, "num_experts": 8, "moe_topk": 2},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": VOCABULARY - 9},  # read by generate, with no default
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},  # read by the model, with no default
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 24},  # likewise
    # Which layers have experts, or attention, is said by numbers that suit the full depth only.
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "FlintConfig": {"mlp_only_layers": [0]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    # Sizes tied to each other.
    "DeepseekOcr2SamVisionConfig": {"output_channels": 8, "downsample_channels": [8, 8]},
    "Ernie4_5_VLMoeTextConfig": {  # experts for text and for images; three sections share the head's frequencies
        "moe_intermediate_size": [24, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "Glm4vMoeTextConfig": {  # likewise, of half the head
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        },
    },
    "Glm5NextTextConfig": {"index_kpool": 4},  # divides index_topk
    "GraniteMoeHybridConfig": {  # heads of the mixer divide mamba_expand * hidden_size
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
    },
    "MuseSparkAudioConfig": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 8, 8]},  # one size for each layer
    "Qwen4ExpTextConfig": {  # the sparse attention of its full-attention layers has no defaults
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "UnlimitedOcrSamVisionConfig": {"output_channels": 8, "downsample_channels": [8, 8]},
}


def tiny_config(cls: type[PreTrainedConfig], **defaults: Any) -> PreTrainedConfig:
    """`defaults` are those that a configuration around this one has for it."""
    values: dict[str, Any] = {}
    placeholders = iter(range(VOCABULARY - 1, WORDS, -1))
    for field in fields(cls):
        default = defaults.get(field.name, field.default)
        if field.name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            values[field.name] = None  # no word ends a sentence early
        elif re.fullmatch(r".*_(token_id|token_index|bos_id|eos_token_id|pad_id)", field.name):
            values[field.name] = next(placeholders)
        elif (size := _small(field.name, default)) is not None:
            values[field.name] = size
        elif field.name in defaults:
            values[field.name] = default
    if {"num_key_value_heads", "num_attention_heads"} <= values.keys():
        grouped = cls.num_key_value_heads < cls.num_attention_heads
        values["num_key_value_heads"] = min(values["num_key_value_heads"], 2 if grouped else 4)
    values |= _one_layer_of_each_kind(cls)
    for key, spec in cls.sub_configs_defaults.items():
        values[key] = tiny_config(_class_of(spec), **spec.init_kwargs)
    return cls(**{**values, **CHANGES.get(cls.__name__, {})})


def _small(name: str, default: Any) -> int | None:
    if default is not None and (isinstance(default, bool) or not isinstance(default, int)):
        return None
    for pattern, largest in (NEEDED if default is None else SIZES).items():
        if re.fullmatch(pattern, name):
            return largest if default is None else min(default, largest)
    return None


def _one_layer_of_each_kind(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """The per-layer lists of the default config, cut down to the first layer of each kind; at least two layers."""
    if not isinstance(getattr(cls, "num_hidden_layers", None), int):
        return {}
    full = cls()
    may_be_lists = [field.name for field in fields(cls) if not isinstance(field.default, int | float | str)]
    lists = {
        name: value
        for name in may_be_lists
        if isinstance(value := getattr(full, name, None), list)
        and len(value) == full.num_hidden_layers
        and len(set(value)) < len(value)  # or else it numbers the layers
    }
    kinds = list(zip(*lists.values(), strict=True))
    chosen = sorted({kinds.index(kind) for kind in kinds})
    if len(chosen) < 2:
        return {name: value[:2] for name, value in lists.items()}
    return {"num_hidden_layers": len(chosen), **{name: [value[i] for i in chosen] for name, value in lists.items()}}


def _class_of(spec: Any) -> type[PreTrainedConfig]:
    return spec.config_class if issubclass(spec.config_class, PreTrainedConfig) else CONFIG_MAPPING[spec.model_type]
