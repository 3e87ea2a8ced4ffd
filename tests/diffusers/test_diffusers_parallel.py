"""Diffusers' own parallelism in two processes, with the kernel as attention in each of them.

Diffusers 0.42.1 does not offer either kind on CPU: tensor parallelism refuses the device by name, and both divide by
the number of accelerators. The processes here say that a CPU counts as one; everything after that is Diffusers' code.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.multiprocessing

from pallas_hub.layers import use_loader


@pytest.mark.slow  # two more processes that import everything
def test_two_processes_compute_what_one_does(tmp_path):
    torch.multiprocessing.spawn(_check_rank, (str(tmp_path / "store"),), nprocs=2)


def _check_rank(rank: int, store: str) -> None:
    from diffusers import ContextParallelConfig, TensorParallelConfig
    from diffusers.hooks import tensor_parallel
    from diffusers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.accelerator.device_count = lambda: 1
    tensor_parallel._SUPPORTED_TP_DEVICES += ("cpu",)
    try:
        with use_loader(_load):
            _check_pipeline(TensorParallelConfig(tp_degree=2), heads=1)
            for config in (ContextParallelConfig(ulysses_degree=2), ContextParallelConfig(ring_degree=2)):
                parallel = _check_pipeline(config, heads=2 // config.ulysses_degree)
                _check_gradients(parallel, rank)
    finally:
        torch.distributed.destroy_process_group()


def _load(repo_id, version=None):
    return importlib.import_module(repo_id.split("/")[1].replace("-", "_"))


def _check_pipeline(config, heads):
    """Same latents; the kernel ran in every layer, for the heads that this process has. Returns Diffusers' config."""
    from tiny_pipelines import flux, randn

    tiny = flux()
    transformer = tiny.pipe.transformer
    prompt = randn(2, 8, 24)  # context parallelism divides its length
    wanted = tiny.latents(prompt_embeds=prompt)
    transformer.set_attention_backend("pallas")
    transformer.enable_parallelism(config=config)
    kernel = _load("pallas-hub/flash-attention")
    seen = []
    watched = kernel.op.attend

    def attend(q, *args):
        seen.append(q.shape[2])
        return watched(q, *args)

    kernel.op.attend = attend
    try:
        with kernel._bridge.record_paths():
            came = tiny.latents(prompt_embeds=prompt)
    finally:
        kernel.op.attend = watched
    torch.testing.assert_close(came, wanted, rtol=1e-5, atol=1e-5)
    assert set(seen) == {heads}
    transformer.reset_attention_backend()
    return transformer._parallel_config


def _check_gradients(parallel, rank):
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from tiny_pipelines import randn

    whole = [randn(2, 6, 2, 8, seed=seed).requires_grad_() for seed in range(3)]
    dout = randn(2, 6, 2, 8, seed=3)
    out = dispatch_attention_fn(*whole, backend="native")
    wanted = (out, *torch.autograd.grad(out, whole, dout))

    own = [x.detach().chunk(2, dim=1)[rank].clone().requires_grad_() for x in whole]
    out = dispatch_attention_fn(*own, backend="pallas", parallel_config=parallel)
    came = (out, *torch.autograd.grad(out, own, dout.chunk(2, dim=1)[rank]))
    for mine, everybody in zip(came, wanted, strict=True):
        torch.testing.assert_close(mine, everybody.chunk(2, dim=1)[rank], rtol=1e-5, atol=1e-5)
    if parallel.context_parallel_config.ulysses_degree == 2:
        _check_mask(parallel, rank, whole, own)


def _check_mask(parallel, rank, whole, own):
    """Every process has the mask of its own keys."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from tiny_pipelines import mask_of

    mask = mask_of(6, 4, width=6).bool()
    wanted = dispatch_attention_fn(*whole, attn_mask=mask, backend="native")
    mine = mask[:, None, None, :].chunk(2, dim=-1)[rank].contiguous()
    came = dispatch_attention_fn(*own, attn_mask=mine, backend="pallas", parallel_config=parallel)
    torch.testing.assert_close(came, wanted.chunk(2, dim=1)[rank], rtol=1e-5, atol=1e-5)
