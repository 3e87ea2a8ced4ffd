"""The name "pallas" is in Diffusers' table, in whatever order things are imported and however it is asked for."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import types

import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)
from tiny_pipelines import flux

from pallas_hub.layers import diffusers_backend, use_loader

NAMES = ["pallas", "pallas-hub/flash-attention"]


def run(code: str, *args: str, **env: str) -> list[str]:
    command = [sys.executable, "-c", code, *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **env})
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_pallas_hub_first_and_the_variable_that_names_the_backend():
    code = """
import sys, pallas_hub
print([name for name in ("torch", "diffusers", "transformers", "jax") if name in sys.modules])
waiting = lambda: sum(getattr(finder, "name", "") == "diffusers.models.attention_dispatch" for finder in sys.meta_path)
print(waiting())
import diffusers.models.attention_dispatch as dispatch
from diffusers.utils import constants
print(waiting(), dispatch._AttentionBackendRegistry.get_active_backend()[0].value)
print(constants.DIFFUSERS_ATTN_BACKEND, dispatch.DIFFUSERS_ATTN_BACKEND, dispatch.AttentionBackendName("pallas").value)
"""
    assert run(code, DIFFUSERS_ATTN_BACKEND="pallas") == ["[]", "1", "0 pallas", "pallas pallas pallas"]


def test_diffusers_first_and_a_pickled_backend_that_brings_pallas_hub():
    code = """
import pickle, sys, diffusers.models.attention_dispatch as dispatch
print("pallas_hub" in sys.modules, "pallas" in dispatch.AttentionBackendName._value2member_map_)
backend = pickle.loads(bytes.fromhex(sys.argv[1]))
print(backend is dispatch.AttentionBackendName("pallas"), backend in dispatch._AttentionBackendRegistry.list_backends())
print(dispatch._AttentionBackendRegistry.get_active_backend()[0].value)
"""
    pickled = pickle.dumps(AttentionBackendName("pallas")).hex()
    assert run(code, pickled) == ["False False", "True True", "native"]


@pytest.mark.parametrize("name", NAMES)
def test_the_added_member_is_like_any_other(name):
    backend = AttentionBackendName(name)
    assert backend == name
    assert backend in list(AttentionBackendName)
    assert AttentionBackendName.__members__[backend.name] is AttentionBackendName[backend.name] is backend
    assert getattr(AttentionBackendName, backend.name) is backend
    assert pickle.loads(pickle.dumps(backend)) is backend
    assert copy.deepcopy(backend) is copy.copy(backend) is backend
    assert backend in _AttentionBackendRegistry.list_backends()
    assert len(set(AttentionBackendName)) == len(AttentionBackendName)


def test_registering_twice_is_registering_once():
    before = _AttentionBackendRegistry._backends["pallas"], len(AttentionBackendName)
    diffusers_backend.register()
    diffusers_backend.register_when_imported()
    assert (_AttentionBackendRegistry._backends["pallas"], len(AttentionBackendName)) == before


@pytest.mark.parametrize("name", NAMES)
def test_setting_the_backend_loads_nothing_and_the_first_call_loads_the_kernel(name, loads, ran):
    tiny = flux()
    tiny.pipe.transformer.set_attention_backend(name)
    assert {block.attn.processor._attention_backend for block in tiny.pipe.transformer.transformer_blocks} == {name}
    assert loads == []
    tiny.latents()
    assert loads == ["pallas-hub/flash-attention"]
    assert {op for op, _ in ran} == {"flash_attention::attention"}


def test_the_context_manager_takes_the_name(ran):
    q = torch.randn(1, 3, 2, 8)
    with attention_backend("pallas"):
        dispatch_attention_fn(q, q, q)
        assert len(ran) == 1
    dispatch_attention_fn(q, q, q)
    assert len(ran) == 1


def test_one_layer_can_be_set_alone(ran):
    attn = flux().pipe.transformer.transformer_blocks[0].attn
    attn.set_attention_backend("pallas")
    assert attn.processor._attention_backend is AttentionBackendName("pallas")


def test_an_unknown_name_is_refused_with_ours_in_the_list():
    with pytest.raises(ValueError, match=r"`backend='palas'` must be one of .*pallas"):
        flux().pipe.transformer.set_attention_backend("palas")


def test_a_kernel_without_the_function_is_named():
    q = torch.randn(1, 3, 2, 8)
    wanted = 'attention backend "pallas": kernel pallas-hub/flash-attention must have scaled_dot_product_attention, and'
    empty = use_loader(lambda repo_id, version: types.ModuleType("empty"))
    with empty, pytest.raises(ValueError, match=f"{wanted} has not."):
        dispatch_attention_fn(q, q, q, backend="pallas")


def test_another_diffusers_goes_on_without_the_backend():
    other = types.ModuleType("attention_dispatch")
    with pytest.warns(
        UserWarning,
        match=r'set_attention_backend\("pallas"\) is not available: diffusers.models.attention_dispatch of this '
        r"version of diffusers has no AttentionBackendName. Try: pip install diffusers==0.42.1",
    ):
        diffusers_backend._enter(other)


def test_a_pickle_names_a_kernel_that_was_chosen_by_name(loads):
    backend = diffusers_backend.backend_named("pallas:pallas-hub/flash-attention@1")
    q = torch.randn(1, 3, 2, 8)
    dispatch_attention_fn(q, q, q, backend=backend)
    assert loads == ["pallas-hub/flash-attention"]
    assert diffusers_backend.kernel_behind(backend.value).version == 1
