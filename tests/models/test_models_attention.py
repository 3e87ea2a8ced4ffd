"""Every causal language model with Transformers' attention interface computes with the kernel what it computes eagerly.

By attn_implementation="pallas-hub/flash-attention" ("setting", as Transformers loads it, short of the download) and by
pallas_hub.kernelize: logits of a batch that is padded at the left, longer than the sliding windows, and what greedy
generation with caches goes on with. What cannot take the kernel is named here, or says so itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_models import NOT_RUN, Run, build, families, run
from default_kernels import load
from transformers import PreTrainedModel

import pallas_hub
from pallas_hub.layers import attention
from pallas_hub.layers.loading import ATTENTION, DEFAULT_REPOS

# One model's file scripts a function with the compiler of old.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

KERNEL = load(DEFAULT_REPOS[ATTENTION])
NAME = DEFAULT_REPOS[ATTENTION]
FAMILIES = 147  # in Transformers 5.22.2
ONLY_ATTENTION = {"attention": NAME, "RMSNorm": None, "experts": None, "router": None}

# What Transformers' own code for flash-attn cannot do; kernelize can.
NOT_BY_SETTING = {"gpt2": "it looks for a linear layer in the attention, to read a dtype off it"}
# What kernelize leaves alone though Transformers allows it.
NOT_BY_KERNELIZE = {"hrm_text": "HrmTextModel has rules of its own for its attention"}


@dataclass
class Built:
    family: Any
    model: Any
    wanted: Run


@pytest.fixture(scope="module", autouse=True)
def kernel_from_source(kernels_from_source):
    """Transformers' loader gives what is in kernels/, and no other kernel."""

    def get_kernel(name: str, **options: Any) -> Any:
        if name != NAME:
            raise ValueError(f"asked for {name}")
        return KERNEL

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.integrations.hub_kernels.get_kernel", get_kernel)
        yield


@pytest.fixture(scope="module", params=families(), ids=str)
def built(request, kernel_from_source, one_thread):
    if str(request.param) in NOT_RUN:
        pytest.skip(f"cannot be run: {NOT_RUN[str(request.param)]}")
    model = build(request.param)
    return Built(request.param, model, run(model))


def _assert_same(built: Built) -> None:
    with KERNEL._bridge.record_paths() as ran:
        came = run(built.model)
    assert {name.partition("::")[2] for name, _ in ran} == {"attention"}
    assert (came.logits - built.wanted.logits).abs().max() <= 1e-5 * built.wanted.logits.abs().max()
    if built.wanted.tokens is not None:
        assert torch.equal(came.tokens, built.wanted.tokens)


def _owner(model: Any) -> Any:
    return next(owner for _, owner in attention.owners(model) if owner is not None)


def test_by_setting(built):
    model = built.model
    if not _owner(model)._supports_flash_attn:
        pytest.skip("it says that it does not support flash attention, though Transformers lets it run")
    if any(
        module._compatible_flash_implementations for module in model.modules() if isinstance(module, PreTrainedModel)
    ):
        with pytest.raises((ValueError, ImportError)):  # of other kernels
            model.set_attn_implementation(NAME)
        pytest.skip("it lists the kernels that it takes")
    model.set_attn_implementation(NAME)
    try:
        if str(built.family) in NOT_BY_SETTING:
            with pytest.raises(Exception):  # noqa: B017
                run(model)
            pytest.skip(NOT_BY_SETTING[str(built.family)])
        _assert_same(built)
    finally:
        model.set_attn_implementation("eager")


def test_by_kernelize(built):
    model = built.model
    supports = _owner(model)._supports_flash_attn
    try:
        if not supports or str(built.family) in NOT_BY_KERNELIZE:
            with pytest.warns(UserWarning, match="none of the"):
                report = pallas_hub.kernelize(model, kernels=ONLY_ATTENTION)
            reason = NOT_BY_KERNELIZE.get(
                str(built.family), "does not support flash attention, whose masks it would get"
            )
            reasons = {row.reason for row in report if row.reason and "told to leave" not in row.reason}
            assert reasons
            assert all(reason in text for text in reasons)
            return
        report = pallas_hub.kernelize(model, kernels=ONLY_ATTENTION)
        layers = {path for path, module in model.named_modules() if attention.is_attention(module)}
        assert {row.path for row in report.swapped} == layers
        _assert_same(built)
    finally:
        pallas_hub.unkernelize(model)
    assert model.config._attn_implementation == "eager"


def test_the_list_of_families_is_what_transformers_holds():
    assert len(families()) == FAMILIES
    assert all(issubclass(family.model_class, PreTrainedModel) for family in families())


def test_what_is_said_not_to_run_does_not():
    by_name = {str(family): family for family in families()}
    for name in NOT_RUN:
        with pytest.raises((AttributeError, IndexError, RuntimeError)):
            run(build(by_name[name]))
