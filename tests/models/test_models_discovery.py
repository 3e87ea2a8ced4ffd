"""The list of models is what the installed Transformers holds, and what is left out of it is left out for a reason."""

from __future__ import annotations

import importlib
import re

import pytest
from built_models import NOT_BUILT, NOT_GENERATING, NotBuilt, build
from moe_models import MODELS, cases, model_files
from tiny_config import CHANGES

from pallas_hub.layers.experts import is_experts_class

FILES = 62  # in Transformers 5.22.2


def test_every_file_that_uses_the_experts_interface_is_found():
    mention = {path for path in MODELS.glob("*/*.py") if "use_experts_implementation" in path.read_text("utf-8")}
    generated_from = {path for path in mention if path.name.startswith("modular_")}
    assert mention - generated_from == set(model_files())
    assert len(model_files()) == FILES


def test_what_is_found_by_its_text_is_what_the_decorator_has_prepared():
    for case in cases():
        prepared = {
            name
            for name, value in vars(case.module).items()
            if isinstance(value, type) and hasattr(value, "forward") and is_experts_class(value)
        }
        assert prepared == {other.experts for other in cases() if other.path == case.path}


def test_the_changes_to_configurations_are_of_some_that_exist():
    modules = {case.module.__name__.replace(".modeling_", ".configuration_") for case in cases()}
    assert CHANGES.keys() <= {name for module in modules for name in vars(importlib.import_module(module))}


def entries_to_remove(not_built: dict[str, str]) -> list[str]:
    by_name = {str(case): case for case in cases()}
    found = [f"{name}: there is no such case: remove it" for name in not_built if name not in by_name]
    for name in not_built.keys() & by_name.keys():
        try:
            build(by_name[name])
        except NotBuilt:
            continue
        found.append(f"{name}: it can be built after all: remove it")
    return found


def test_what_is_said_not_to_build_does_not():
    assert entries_to_remove(NOT_BUILT) == []


def test_an_entry_that_can_be_built_is_found_out():
    assert entries_to_remove({"mixtral": "it is said to need a GPU", "mixtrel": "a slip of the pen"}) == [
        "mixtrel: there is no such case: remove it",
        "mixtral: it can be built after all: remove it",
    ]


def test_a_model_that_cannot_be_built_says_why_for_each_of_its_classes(monkeypatch):
    monkeypatch.setitem(CHANGES, "MixtralConfig", {"hidden_act": "no such activation"})
    (mixtral,) = (case for case in cases() if str(case) == "mixtral")
    with pytest.raises(
        NotBuilt, match=re.escape("mixtral: MixtralForCausalLM: KeyError: 'no such activation'; Mixtral")
    ):
        build(mixtral)


def test_what_is_said_not_to_generate_cannot():
    by_name = {str(case): case for case in cases()}
    assert [name for name in NOT_GENERATING if build(by_name[name]).model.can_generate()] == []
