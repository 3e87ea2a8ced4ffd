"""Layers whose processors call torch's attention directly, which Diffusers' own setting does not reach."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor

import pallas_hub


def unet() -> UNet2DConditionModel:
    """As in Stable Diffusion: self-attention, and cross-attention to the prompt."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=24,
        attention_head_dim=2,
        norm_num_groups=8,
    ).eval()


def run(model: UNet2DConditionModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    image, prompt = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 7, 24, generator=generator)
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    return model(image, 10, prompt, encoder_attention_mask=mask).sample


def test_a_unet_with_a_masked_prompt(ran):
    model = unet()
    wanted = run(model)
    report = pallas_hub.kernelize(model)
    assert len(report.swapped) == 8
    torch.testing.assert_close(run(model), wanted, rtol=1e-4, atol=1e-5)
    assert [op for op, _ in ran] == ["flash_attention::attention"] * 8
    pallas_hub.unkernelize(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(run(model), wanted)


def test_a_processor_that_leaves_the_backend_to_diffusers(ran):
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0

    torch.manual_seed(0)
    layer = Attention(query_dim=32, heads=2, dim_head=16, qk_norm="rms_norm", processor=CosmosAttnProcessor2_0())
    x = torch.randn(2, 5, 32)
    wanted = layer(x)
    pallas_hub.kernelize(layer, kernels=["attention"])
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    assert ran == [("flash_attention::attention", "torch")]


def test_a_processor_that_names_torchs_backend_is_left_alone():
    from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioAttnBlock1D

    (row,) = pallas_hub.explain(MMAudioAttnBlock1D(8))
    assert "MMAudioAttnProcessor, neither chooses a backend nor calls torch's" in row.reason


def test_gradients_go_through_the_kernel(ran):
    model = unet()
    weight = model.mid_block.attentions[0].transformer_blocks[0].attn2.to_k.weight
    (wanted,) = torch.autograd.grad(run(model).square().sum(), weight)
    pallas_hub.kernelize(model)
    (came,) = torch.autograd.grad(run(model).square().sum(), weight)
    torch.testing.assert_close(came, wanted, rtol=1e-4, atol=1e-5)
    assert ("flash_attention::attention_backward", "torch") in ran


def test_the_processor_that_spells_attention_out_is_left_alone():
    model = unet()
    model.set_attn_processor(AttnProcessor())
    with pytest.warns(pallas_hub.layers.errors.NothingSwappedWarning):
        report = pallas_hub.kernelize(model)
    assert {layer.reason for layer in report} == {
        "its processor, AttnProcessor, neither chooses a backend nor calls torch's scaled_dot_product_attention"
    }


def test_heads_wider_than_the_kernel_takes_are_left_alone():
    vae = AutoencoderKL(block_out_channels=(512,), norm_num_groups=8, layers_per_block=0)
    with pytest.warns(pallas_hub.layers.errors.NothingSwappedWarning):
        report = pallas_hub.kernelize(vae)
    assert {layer.reason for layer in report} == {"its heads are 512 wide; the kernel takes up to 256"}


def test_a_processor_made_for_another_backend_is_left_alone():
    from diffusers.models.attention import AttentionModuleMixin

    class Processor:
        _attention_backend = "flex"

    class Layer(torch.nn.Module, AttentionModuleMixin):
        def __init__(self):
            super().__init__()
            self.processor = Processor()

    (row,) = pallas_hub.explain(Layer())
    assert row.reason == "its processor, Processor, needs the backend flex"
