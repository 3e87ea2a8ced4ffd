"""A tiny pipeline of each family: built from configs, with random weights. Prompts are given as embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
)


class Tiny(NamedTuple):
    pipe: Any
    inputs: dict[str, Any]

    def latents(self, **changed: Any) -> torch.Tensor:
        """After two steps, from the same noise each time."""
        noise = torch.Generator().manual_seed(0)
        (result,) = self.pipe(
            **{**self.inputs, **changed},
            num_inference_steps=2,
            generator=noise,
            output_type="latent",
            return_dict=False,
        )
        return result


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask_of(*lengths: int, width: int) -> torch.Tensor:
    """(prompts, width): 1 for each prompt's own tokens, 0 for what fills it up."""
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


def flux() -> Tiny:
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    none = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **none)
    inputs = {"prompt_embeds": randn(2, 7, 24), "pooled_prompt_embeds": randn(2, 8), "height": 64, "width": 48}
    return _finished(pipe, inputs)


def qwen_image() -> Tiny:
    """Its two prompts have different lengths: the joint attention has a mask."""
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 4, 8),
    )
    none = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    pipe = QwenImagePipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **none)
    inputs = {
        "prompt_embeds": randn(2, 7, 24),
        "prompt_embeds_mask": mask_of(7, 3, width=7),
        "negative_prompt_embeds": randn(2, 6, 24, seed=1),
        "negative_prompt_embeds_mask": mask_of(2, 6, width=6),
        "height": 64,
        "width": 48,
    }
    return _finished(pipe, inputs)


def sd3() -> Tiny:
    """One of its layers has a second attention, of the image alone, as in SD 3.5."""
    transformer = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    none = {f"{part}{number}": None for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")}
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipe = StableDiffusion3Pipeline(scheduler=scheduler, transformer=transformer, vae=None, **none)
    inputs = {
        "prompt_embeds": randn(1, 7, 24),
        "pooled_prompt_embeds": randn(1, 8),
        "negative_prompt_embeds": randn(1, 7, 24, seed=1),
        "negative_pooled_prompt_embeds": randn(1, 8, seed=1),
        "height": 64,
        "width": 48,
    }
    return _finished(pipe, inputs)


def wan() -> Tiny:
    """Self-attention, and cross-attention to the prompt."""
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    none = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    pipe = WanPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **none)
    inputs = {
        "prompt_embeds": randn(1, 7, 24),
        "negative_prompt_embeds": randn(1, 7, 24, seed=1),
        "height": 64,
        "width": 48,
        "num_frames": 9,
    }
    return _finished(pipe, inputs)


def ltx() -> Tiny:
    """Its cross-attention has a mask that is added to the scores."""
    transformer = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=24,
    )
    none = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    pipe = LTXPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **none)
    inputs = {
        "prompt_embeds": randn(2, 7, 24),
        "prompt_attention_mask": mask_of(7, 3, width=7),
        "negative_prompt_embeds": randn(2, 7, 24, seed=1),
        "negative_prompt_attention_mask": mask_of(2, 6, width=7),
        "height": 128,
        "width": 96,
        "num_frames": 17,
    }
    return _finished(pipe, inputs)


FAMILIES: dict[str, Callable[[], Tiny]] = {"flux": flux, "qwen-image": qwen_image, "sd3": sd3, "wan": wan, "ltx": ltx}


def _finished(pipe: Any, inputs: dict[str, Any]) -> Tiny:
    """Every weight random, also those that a new model has as zeros and ones."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in pipe.transformer.named_parameters():
            weight.normal_(generator=generator).mul_(0.1)
            if name.endswith("weight") and weight.dim() == 1:
                weight.add_(1.0)
    pipe.transformer.eval()
    return Tiny(pipe, inputs)
