"""Causal language models of the installed Transformers that look into its table of attention functions, built tiny."""

from __future__ import annotations

import copy
import functools
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_config
import torch
import transformers
from built_models import LARGEST, _with_random_weights, words
from torch import Tensor

MODELS = Path(transformers.__file__).parent / "models"
LENGTH, PADDED = 12, 5  # longer than the tiny models' sliding windows of 8; the first prompt is padded at its left
TOKENS = 6

# Where a model's own rules want more than a small number, as in tiny_config.py. By class of configuration.
_WITH_PADDING: dict[str, Any] = {"pad_token_id": 0}  # they look for padding among the ids
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_KOSMOS: dict[str, Any] = {**_WITH_PADDING, "embed_dim": 32, "layers": 2, "attention_heads": 4, "ffn_dim": 24}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
CHANGES: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64},
    "CTRLConfig": {**_GPT2, "dff": 24},
    "CamembertConfig": _WITH_PADDING,
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "CwmConfig": {"bos_token_id": 1},
    "Data2VecTextConfig": _WITH_PADDING,
    "Emu3TextConfig": {"bos_token_id": 1, "pad_token_id": 0},
    "GPT2Config": _GPT2,
    "GPTBigCodeConfig": _GPT2,
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "HrmTextConfig": {"prefix_lm": False},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "Kosmos2TextConfig": _KOSMOS,
    "Kosmos2_5TextConfig": _KOSMOS,
    "LongcatFlashConfig": {"zero_expert_num": 4, "num_layers": 2, "num_hidden_layers": 2},
    "MinistralConfig": {"head_dim": 8},
    "MllamaTextConfig": {"bos_token_id": 1, "pad_token_id": 0},
    "ModernBertDecoderConfig": {"bos_token_id": 1, "eos_token_id": 95, "pad_token_id": 0},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Phi4MultimodalAudioConfig": {"nemo_conv_channels": 8, "ext_pw_out_channel": 32, "num_blocks": 1},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},  # the third layer is the first with attention
    "RobertaConfig": _WITH_PADDING,
    "RobertaPreLayerNormConfig": _WITH_PADDING,
    "XLMRobertaConfig": _WITH_PADDING,
    "XLMRobertaXLConfig": _WITH_PADDING,
    "XmodConfig": {**_WITH_PADDING, "default_language": "en_XX"},
    "ZambaConfig": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
}


# What cannot be built or run, and why. Checked: an entry that can be is an error.
NOT_RUN = {
    "blt": "its config has no num_hidden_layers, which the cache of generate reads",
    "csm": "it decodes the codes of one frame, from the state of another model",
    "dbrx": "its attention config has no rope_theta, which its own code reads",
    "musicgen": "its ids come in rows, one for each codebook",
    "musicgen_melody": "its ids come in rows, one for each codebook",
}


@dataclass(frozen=True)
class Family:
    folder: str
    module: str
    name: str  # of the class

    def __str__(self) -> str:
        return self.module.removeprefix("modeling_")

    @property
    def model_class(self) -> Any:
        return getattr(importlib.import_module(f"transformers.models.{self.folder}.{self.module}"), self.name)


@functools.cache
def families() -> tuple[Family, ...]:
    """The first causal language model of each file that has one and uses the attention interface."""
    found = []
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        heads = re.findall(r"^class (\w+ForCausalLM|\w+LMHeadModel)\b", source, re.MULTILINE)
        if heads and "ALL_ATTENTION_FUNCTIONS" in source:
            found.append(Family(path.parent.name, path.stem, heads[0]))
    return tuple(found)


def build(family: Family) -> Any:
    cls = family.model_class
    with mock.patch.dict(tiny_config.CHANGES, CHANGES):
        config = tiny_config.tiny_config(cls.config_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters are not tiny")
    return _with_random_weights(cls._from_config(config, attn_implementation="eager")).eval()


@dataclass
class Run:
    logits: Tensor  # of words only, (words, vocabulary)
    tokens: Tensor | None


def run(model: Any) -> Run:
    """Logits of a batch with padding at the left, and what follows it, the best token each time."""
    ids, mask = words(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :PADDED] = 0
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        tokens = None
        if model.can_generate():
            torch.manual_seed(0)
            options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
            tokens = model.generate(input_ids=ids, attention_mask=mask, **options)
    return Run(logits, tokens)
