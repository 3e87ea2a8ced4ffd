"""The public API of a version: read without running it, recorded, and kept."""

import ast
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from registry_shelf import Shelf

from pallas_hub.registry.api import Api, changes, read_api
from pallas_hub.registry.build import check
from pallas_hub.registry.errors import ApiChanged, BuildRefused, ManifestError
from pallas_hub.registry.manifest import Manifest, read_manifest, write_manifest
from pallas_hub.registry.record import check_recorded, freeze, record
from pallas_hub.registry.source import read_source


def read(**files: str) -> Api:
    return read_api("k", {f"{name}.py".replace("init", "__init__"): ast.parse(text) for name, text in files.items()})


def test_the_api_is_read_through_relative_imports():
    api = read(
        init="from . import layers\nfrom .op import f as g, VALUE, C\n__all__ = ['VALUE', 'C', 'g', 'layers']",
        op="from .deep import f\nVALUE = 3\nclass C: ...",
        deep="def f(a, b=1, *, c: int = 2) -> int: ...",
        layers="from torch import nn\nclass L(nn.Module):\n  can_torch_compile = True\n  def forward(self, x): ...",
    )
    assert api.names == {"VALUE": "<value>", "C": "<class>", "g": "(a, b=1, *, c: int=2) -> int", "layers": "<module>"}
    assert api.layers == {"L": {"forward": "(self, x)", "can_torch_compile": True, "has_backward": True}}


def test_a_name_in_all_that_nothing_defines_is_refused():
    with pytest.raises(BuildRefused, match="__all__ lists 'f', which is neither defined nor imported"):
        read(init="__all__ = ['f']")


COMPATIBLE = [
    ("(a)", "(a, b=1)"),
    ("(a)", "(a, *, b=1)"),
    ("(a, *, b=1)", "(a, b=1)"),
    ("(a)", "(a: int) -> int"),
    ("(a, /)", "(b, /)"),
    ("(a)", "(a, *args, **kwargs)"),
]
INCOMPATIBLE = [
    ("(a, b=1)", "(a)"),
    ("(a)", "(b)"),
    ("(a, b=1)", "(a, b=2)"),
    ("(a, b)", "(b, a)"),
    ("(a, b=1)", "(a, *, b=1)"),
    ("(a)", "(a, b)"),
    ("(a)", "(a, *, b)"),
    ("(a)", "(a, /)"),
    ("(a, *, b=1)", "(a)"),
    ("(a, *args)", "(a)"),
    ("(a, *args)", "(a, b=1, *args)"),
    ("(a, **kwargs)", "(a)"),
    ("(a=1)", "(a)"),
]


@pytest.mark.parametrize(("old", "new"), COMPATIBLE)
def test_compatible_signatures(old: str, new: str):
    assert changes(Api({"f": old}), Api({"f": new, "g": "(x)"})) == []


@pytest.mark.parametrize(("old", "new"), INCOMPATIBLE)
def test_incompatible_signatures(old: str, new: str):
    assert changes(Api({"f": old}), Api({"f": new})) == [f"f{old} became {new}"]


def test_losing_a_name_a_kind_or_a_layer_is_a_change():
    layer = {"forward": "(self, x)", "can_torch_compile": True, "has_backward": True}
    old = Api({"f": "(a)", "v": "<value>"}, {"L": layer})
    assert changes(old, Api({"v": "(a)"}, {})) == ["f is gone from __all__", "v was <value>, is (a)", "layer L is gone"]
    grown = {**layer, "forward": "(self, x, y=1)", "has_backward": False}
    assert changes(Api({}, {"L": layer}), Api({}, {"L": grown})) == [
        "layer L: forward(self, x) became forward(self, x, y=1)",
        "layer L: has_backward was true, is false",
    ]


names = st.sampled_from("abcdef")


@st.composite
def signatures(draw) -> tuple[list[tuple[str, int | None]], list[tuple[str, int | None]]]:
    """(positional, keyword-only) parameters with defaults, as Python accepts them."""
    chosen = draw(st.lists(names, unique=True, max_size=5))
    split = draw(st.integers(0, len(chosen)))
    first_default = draw(st.integers(0, split))
    positional = [(name, 1 if index >= first_default else None) for index, name in enumerate(chosen[:split])]
    return positional, [(name, draw(st.sampled_from([None, 1]))) for name in chosen[split:]]


def spell(signature) -> str:
    positional, keyword = ([name + (f"={d}" if d else "") for name, d in part] for part in signature)
    return f"({', '.join([*positional, *(['*'] if keyword else []), *keyword])})"


def calls(signature) -> list[tuple[int, frozenset[str]]]:
    """A set of calls that fit: all arguments by position, only the required ones, all by keyword."""
    positional, keyword = signature
    required = [name for name, default in positional if default is None]
    needed = frozenset(name for name, default in keyword if default is None)
    every = frozenset(name for name, _ in keyword)
    by_name = frozenset(name for name, _ in positional)
    return [(len(positional), every), (len(required), needed), (0, by_name | every)]


@given(signatures(), signatures())
def test_a_call_that_fitted_still_fits_if_no_change_is_reported(old, new):
    if changes(Api({"f": spell(old)}), Api({"f": spell(new)})):
        return
    function = eval(f"lambda {spell(new)[1:-1]}: None")
    for count, keywords in calls(old):
        function(*range(count), **dict.fromkeys(keywords))


@given(signatures())
def test_a_signature_is_compatible_with_itself(signature):
    assert changes(Api({"f": spell(signature)}), Api({"f": spell(signature)})) == []


def test_recording_twice_gives_the_same_bytes_and_the_manifest_is_read_back(shelf: Shelf):
    first = record("tiny-scale", shelf.sources)
    path = shelf.sources.manifests / "tiny-scale.toml"
    text = path.read_text()
    record("tiny-scale", shelf.sources)
    assert path.read_text() == text
    assert read_manifest("tiny-scale", shelf.sources) == first
    assert tomllib.loads(text)["versions"]["1"]["api"]["scale"] == "(x: Tensor, factor: float=2.0) -> Tensor"
    check_recorded("tiny-scale", shelf.sources)


def test_what_people_write_into_a_manifest_survives_recording(shelf: Shelf):
    manifest = record("tiny-scale", shelf.sources)
    manifest.description = 'Scale a "tensor" \\ by a factor, très fast'
    manifest.versions[1].dtypes = ["float32", "bfloat16"]
    write_manifest(manifest, shelf.sources)
    shelf.append("op.py", "\n# newer\n")
    again = record("tiny-scale", shelf.sources)
    assert (again.description, again.versions[1].dtypes) == (manifest.description, ["float32", "bfloat16"])


def test_a_changed_api_under_the_same_version_is_refused_with_the_change_and_the_mend(shelf: Shelf):
    build = record("tiny-scale", shelf.sources).versions[1].builds[0]
    assert freeze("tiny-scale", 1, build.digests, shelf.sources)
    shelf.edit("torch-ext/tiny_scale/op.py", "factor: float = 2.0", "by: float = 2.0")
    words = (
        r"tiny-scale: the public API of version 1 changed: scale\(x: Tensor, factor: float=2.0\) -> Tensor "
        r"became "
        r"\(x: Tensor, by: float=2.0\) -> Tensor\..*set version = 2 in .*build.toml and run: pallas-hub "
        r"build tiny-scale --record"
    )
    for act in (record, check_recorded):
        with pytest.raises(ApiChanged, match=words):
            act("tiny-scale", shelf.sources)
    shelf.set_version(2)
    assert sorted(record("tiny-scale", shelf.sources).versions) == [1, 2]


def test_adding_to_the_api_is_fine_but_has_to_be_recorded(shelf: Shelf):
    record("tiny-scale", shelf.sources)
    shelf.edit("torch-ext/tiny_scale/op.py", "factor: float = 2.0", "factor: float = 2.0, *, shift: float = 0.0")
    with pytest.raises(ManifestError, match=r"does not list the digests of this build.*build tiny-scale --record"):
        check_recorded("tiny-scale", shelf.sources)
    record("tiny-scale", shelf.sources)
    check_recorded("tiny-scale", shelf.sources)
    assert check(read_source("tiny-scale", shelf.sources)).names["scale"].count("shift") == 1


def test_a_version_that_was_never_released_may_change_but_only_by_recording(shelf: Shelf):
    record("tiny-scale", shelf.sources)
    shelf.edit("torch-ext/tiny_scale/op.py", "factor: float = 2.0", "by: float = 2.0")
    with pytest.raises(ApiChanged, match=r"accepts the change, since version 1 was never released"):
        check_recorded("tiny-scale", shelf.sources)
    record("tiny-scale", shelf.sources)
    check_recorded("tiny-scale", shelf.sources)


def test_losing_a_variant_is_refused(shelf: Shelf):
    record("tiny-scale", shelf.sources)
    shelf.edit("build.toml", '["cpu", "cuda", "tpu"]', '["cpu", "cuda"]')
    with pytest.raises(ApiChanged, match="variant torch-tpu is gone"):
        check_recorded("tiny-scale", shelf.sources)


def test_released_builds_stay_and_unreleased_ones_are_replaced(shelf: Shelf):
    first = record("tiny-scale", shelf.sources).versions[1].builds[0]
    shelf.append("op.py", "\n# second\n")
    second = record("tiny-scale", shelf.sources).versions[1].builds
    assert len(second) == 1
    assert second[0].digests != first.digests
    assert freeze("tiny-scale", 1, second[0].digests, shelf.sources)
    assert not freeze("tiny-scale", 1, second[0].digests, shelf.sources)
    shelf.append("op.py", "\n# third\n")
    builds = record("tiny-scale", shelf.sources).versions[1].builds
    assert [build.released for build in builds] == [True, False]
    assert builds[0].digests == second[0].digests


@pytest.mark.parametrize("text", ["name = 3", "[versions.x]", "name = ", "name = 'a'\n[versions.1]\napi = 3"])
def test_a_damaged_manifest_is_an_error_that_names_the_file(shelf: Shelf, text: str):
    shelf.sources.manifests.mkdir()
    (shelf.sources.manifests / "tiny-scale.toml").write_text(text)
    with pytest.raises(ManifestError, match=r"tiny-scale.toml: not a valid manifest .*Restore it from version control"):
        read_manifest("tiny-scale", shelf.sources)


def test_a_kernel_without_manifest_or_version_says_how_to_record(shelf: Shelf):
    with pytest.raises(ManifestError, match=r"tiny-scale: no manifest in .*Run: pallas-hub build tiny-scale --record"):
        check_recorded("tiny-scale", shelf.sources)
    write_manifest(Manifest("tiny-scale", "pallas-hub/tiny-scale", "Apache-2.0"), shelf.sources)
    with pytest.raises(ManifestError, match="version 1 is not in its manifest"):
        check_recorded("tiny-scale", shelf.sources)
