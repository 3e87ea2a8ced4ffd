"""Building a kernel repo from sources: determinism, metadata, refusals."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from registry_shelf import FIXTURES, Shelf

from pallas_hub.registry.build import build, kernel_id
from pallas_hub.registry.digests import hash_files, hash_variant, tree_digest
from pallas_hub.registry.errors import BuildRefused, SourceError
from pallas_hub.registry.local import load_source
from pallas_hub.registry.paths import Sources
from pallas_hub.registry.source import read_source

VARIANTS = ("torch-cpu", "torch-cuda", "torch-tpu")


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Path -> (mode, bytes) of everything below a folder."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mode, b"" if path.is_dir() else path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def test_building_twice_gives_identical_bytes_whatever_the_surroundings(shelf: Shelf, tmp_path: Path, monkeypatch):
    first = tree(build("tiny-scale", tmp_path / "a", sources=shelf.sources).path)
    moved = tmp_path / "elsewhere"
    shutil.copytree(shelf.root, moved)
    for number, path in enumerate(moved.rglob("*")):
        os.utime(path, (1_000_000_000 + number, 1_000_000_000 + number))
    (moved / "kernels/tiny-scale/torch-ext/tiny_scale/__pycache__").mkdir()
    (moved / "kernels/tiny-scale/torch-ext/tiny_scale/__pycache__/op.cpython-311.pyc").write_bytes(b"x")
    (moved / "kernels/tiny-scale/torch-ext/tiny_scale/.op.py.swp").write_bytes(b"x")
    code = (
        "import os, sys; os.umask(0o077); from pathlib import Path\n"
        "from pallas_hub.registry.build import build; from pallas_hub.registry.paths import Sources\n"
        "root = Path(sys.argv[1]); s = Sources(root / 'kernels', root / 'manifests', root / 'bridge')\n"
        "build('tiny-scale', sys.argv[2], sources=s)\n"
    )
    repository = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Tokyo",
        "PYTHONPATH": str(repository),
    }
    command = [sys.executable, "-c", code, str(moved), str(tmp_path / "b")]
    subprocess.run(command, check=True, env=environment, cwd="/")
    assert tree(tmp_path / "b") == first


def test_a_build_holds_variants_card_licence_and_benchmarks(shelf: Shelf, tmp_path: Path):
    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    files = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    python = ["__init__.py", "late.py", "layers.py", "metadata.json", "op.py"]
    builds = [f"build/{variant}/{name}" for variant in VARIANTS for name in python]
    assert files == sorted(["LICENSE", "README.md", "benchmarks/benchmark_scale.py", *builds])
    card = (place / "README.md").read_text()
    assert 'get_kernel("pallas-hub/tiny-scale", version=1)` on cpu, cuda, tpu' in card
    assert "`scale(x: Tensor, factor: float=2.0) -> Tensor`" in card
    assert "`Scale(self, x: Tensor) -> Tensor`" in card
    assert "Apache License" in (place / "LICENSE").read_text()


def test_the_kernels_library_accepts_metadata_and_digest(shelf: Shelf, tmp_path: Path):
    from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata

    place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
    backends = {"torch-cpu": Backend.CPU, "torch-cuda": Backend.CUDA, "torch-tpu": Backend.TPU}
    ids = set()
    for variant, backend in backends.items():
        metadata = Metadata.read_from_file(place / "build" / variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, place / "build" / variant))
        assert metadata.backend.backend_type == backend
        assert (str(metadata.name.python_name), metadata.version, metadata.license) == ("tiny_scale", 1, "Apache-2.0")
        ids.add(metadata.id)
    assert len(ids) == 3
    assert Build.open(shelf.root / "kernels/tiny-scale").general.backends == list(backends.values())


def test_our_hashes_are_those_of_the_kernels_library(tmp_path: Path):
    from kernels._rust import Digest, DigestAlgorithm

    (tmp_path / "sub/__pycache__").mkdir(parents=True)
    names = ["a.py", ".hidden", "b.pyc", "metadata.json", "metadata.json.sigstore", "sub/metadata.json", "sub/c.json"]
    for name in [*names, "sub/__pycache__/a.pyc"]:
        (tmp_path / name).write_text(name)
    (tmp_path / "link.py").symlink_to("a.py")
    (tmp_path / "folder").symlink_to("sub")
    for algorithm, theirs in (("sha256", DigestAlgorithm.SHA256), ("sha512", DigestAlgorithm.SHA512)):
        assert hash_variant(tmp_path, algorithm) == Digest.hash_variant(theirs, tmp_path).files


def test_the_tree_digest_is_what_sha256sum_computes(shelf: Shelf, tmp_path: Path):
    built = build("tiny-scale", tmp_path / "out", sources=shelf.sources)
    script = "find . -type f ! -name metadata.json | sed 's,^./,,' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    variant = built.path / "build/torch-cpu"
    printed = subprocess.run(script, shell=True, cwd=variant, capture_output=True, text=True, check=True).stdout
    assert built.digests["torch-cpu"] == f"sha256:{printed.split()[0]}" == tree_digest(hash_variant(variant))


def test_ids_differ_by_version_backend_and_content(shelf: Shelf, tmp_path: Path):
    def ids(place: str) -> set[str]:
        path = build("tiny-scale", tmp_path / place, sources=shelf.sources).path
        return {json.loads((path / f"build/{variant}/metadata.json").read_text())["id"] for variant in VARIANTS}

    first = ids("a")
    shelf.append("op.py", "\n# another content\n")
    second = ids("b")
    shelf.set_version(2)
    assert len(first | second | ids("c")) == 9
    assert all(name.isidentifier() for name in first)
    assert kernel_id("rms-norm", 3, "tpu", "sha256:0123456789abcdef") == "_rms_norm_v3_tpu_0123456789ab"


@pytest.mark.parametrize("how", ["link", "folder", "import"])
def test_the_bridge_is_vendored(shelf: Shelf, tmp_path: Path, how: str):
    bridge = shelf.root / "bridge"
    (bridge / "sub").mkdir(parents=True)
    (bridge / "__init__.py").write_text("from .sub import inner\n")
    (bridge / "sub/__init__.py").write_text("inner = 1\n")
    if how == "link":
        (shelf.package() / "_bridge").symlink_to("../../../../bridge")
    elif how == "folder":
        shutil.copytree(bridge, shelf.package() / "_bridge")
    else:
        shelf.append("op.py", "from ._bridge import inner\n")
    variant = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path / "build/torch-cpu"
    assert (variant / "_bridge/sub/__init__.py").read_text() == "inner = 1\n"
    assert not any(path.is_symlink() for path in variant.rglob("*"))


def _add_kernel(shelf: Shelf, name: str, *, vendors: str = "", bridge: bool = False) -> None:
    """A kernel called `name` with one public value, which takes that of the kernel it vendors."""
    package = shelf.package(name)
    package.mkdir(parents=True)
    toml = (shelf.root / "kernels/tiny-scale/build.toml").read_text().replace("tiny-scale", name)
    (shelf.root / "kernels" / name / "build.toml").write_text(toml)
    value = "('own',)"
    if vendors:
        link = "_" + vendors.replace("-", "_")
        (package / link).symlink_to(f"../../../{vendors}/torch-ext/{vendors.replace('-', '_')}")
        value += f" + {link}.value"
    lines = [f"from . import _{vendors.replace('-', '_')}"] if vendors else []
    lines += ["from ._bridge import inner"] if bridge else []
    (package / "__init__.py").write_text("\n".join([*lines, '__all__ = ["value"]', f"value = {value}", ""]))
    if bridge:
        (package / "_bridge").symlink_to("../../../../bridge")
        (shelf.root / "bridge").mkdir(exist_ok=True)
        (shelf.root / "bridge/__init__.py").write_text("inner = 1\n")


def test_a_kernel_vendors_another_one_with_all_that_it_vendors(shelf: Shelf, tmp_path: Path):
    _add_kernel(shelf, "inner-one", bridge=True)
    _add_kernel(shelf, "middle", vendors="inner-one")
    _add_kernel(shelf, "outer", vendors="middle", bridge=True)
    variant = build("outer", tmp_path / "out", sources=shelf.sources).path / "build/torch-cpu"
    files = sorted(path.relative_to(variant).as_posix() for path in variant.rglob("*.py"))
    assert files == [
        "__init__.py",
        "_bridge/__init__.py",
        "_middle/__init__.py",
        "_middle/_inner_one/__init__.py",
        "_middle/_inner_one/_bridge/__init__.py",
    ]
    assert not any(path.is_symlink() for path in variant.rglob("*"))
    assert load_source("outer", sources=shelf.sources).value == ("own", "own", "own")
    source = read_source("outer", shelf.sources)
    assert source.vendored == (shelf.package("middle"), shelf.package("inner-one"))
    shelf.append("__init__.py", "\n# changed\n", name="inner-one")
    changed = read_source("outer", shelf.sources)
    assert changed.fingerprint != source.fingerprint
    assert tree_digest(hash_files(changed.files)) != tree_digest(hash_files(source.files))


def test_an_installed_copy_without_links_builds_the_same(shelf: Shelf, tmp_path: Path):
    _add_kernel(shelf, "inner-one", bridge=True)
    _add_kernel(shelf, "outer", vendors="inner-one")
    shutil.copytree(shelf.root, tmp_path / "installed")  # as a wheel does, this copies what a link points to
    root = tmp_path / "installed"
    installed = Sources(root / "kernels", root / "manifests", root / "bridge")
    assert not any(path.is_symlink() for path in root.rglob("*"))
    assert read_source("outer", installed).files == read_source("outer", shelf.sources).files


@pytest.mark.parametrize(
    ("link", "target", "words"),
    [
        ("_outside", "/etc", r"_outside points to /etc; a kernel ships only its own files and, by a link"),
        ("_tests", "../../tests", r"_tests points to .*/kernels/outer/tests; a kernel ships only its own files"),
        ("plain", "../../../inner-one/torch-ext/inner_one", r"plain points to .*; .* by a link called _<name>, the"),
        ("deep/_in", "../../../../inner-one/torch-ext/inner_one", r"deep/_in: a link to a folder may lie at the top"),
    ],
    ids=["outside", "folder", "name", "deep"],
)  # fmt: skip
def test_a_link_to_a_folder_that_is_no_kernel_is_refused(shelf: Shelf, link: str, target: str, words: str):
    _add_kernel(shelf, "inner-one")
    _add_kernel(shelf, "outer")
    (shelf.root / "kernels/outer/tests").mkdir()
    (shelf.package("outer") / "deep").mkdir()
    (shelf.package("outer") / link).symlink_to(target)
    with pytest.raises(SourceError, match=words):
        read_source("outer", shelf.sources)


def test_kernels_that_vendor_each_other_are_refused(shelf: Shelf):
    _add_kernel(shelf, "left", vendors="right")
    _add_kernel(shelf, "right", vendors="left")
    with pytest.raises(SourceError, match=r"_left: a kernel cannot hold a copy of itself: left -> right -> left\. Rem"):
        read_source("left", shelf.sources)
    _add_kernel(shelf, "mirror", vendors="mirror")
    with pytest.raises(SourceError, match=r"cannot hold a copy of itself: mirror -> mirror\."):
        read_source("mirror", shelf.sources)


REFUSALS = {
    "absolute-import": r"__init__.py:3: 'import transformers': a kernel may import the standard library, "
    "jax, ml_dtypes",
    "no-all": r"no-all: 1 rule broken:\n  __init__.py: no __all__ = \[\.\.\.\] of plain strings",
    "syntax-error": r"syntax-error: __init__.py:1: not valid Python 3",
    "bad-layer": r"2 rules broken:\n  layers.py:4: layer Stateful has '__init__': kernelize swaps in forward "
    "alone",
}


@pytest.mark.parametrize(("name", "words"), REFUSALS.items())
def test_bad_fixture_kernels_are_refused_in_words(shelf: Shelf, tmp_path: Path, name: str, words: str):
    with pytest.raises(BuildRefused, match=words):
        build(name, tmp_path / "out", sources=shelf.sources)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import torch_tpu", "'import torch_tpu'"),
        ("from pallas_hub import registry", "'from pallas_hub import ...'"),
        ("from .. import other", r"'from \.\. import \.\.\.' leaves the kernel's folder"),
        ("from .missing import thing", r"'from \.missing import \.\.\.': no such module in this kernel"),
        ("def f():\n    import einops", "op.py:[0-9]+: 'import einops'"),
        ("import importlib\nimportlib.import_module('pandas')", "import of 'pandas' by name"),
    ],
)
def test_foreign_imports_are_refused(shelf: Shelf, tmp_path: Path, line: str, words: str):
    shelf.append("op.py", f"\n{line}\n")
    with pytest.raises(BuildRefused, match=words):
        build("tiny-scale", tmp_path / "out", sources=shelf.sources)


def test_imports_that_a_kernel_may_use_pass(shelf: Shelf, tmp_path: Path):
    lines = [
        "import jax.numpy",
        "import ml_dtypes, numpy, sympy, json",
        "from torch.nn import functional",
        "from . import late",
    ]
    shelf.append("op.py", "\n" + "\n".join(lines) + "\n")
    build("tiny-scale", tmp_path / "out", sources=shelf.sources)


@pytest.mark.parametrize(
    ("body", "accepted"),
    [
        ("def forward(self, x): return x", True),
        ("weight: object\n    has_backward = True\n    def forward(self, x): return x", True),
        ("def __init__(self): pass\n    def forward(self, x): return x", False),
        ("def forward(self, x): return x\n    def helper(self): pass", False),
        ("scale = 2\n    def forward(self, x): return x", False),
    ],
)
def test_the_layer_rule_agrees_with_the_kernels_library(shelf: Shelf, tmp_path: Path, body: str, accepted: bool):
    from kernels.layer.layer import _validate_layer

    text = f"from torch import nn\n\n\nclass Layer(nn.Module):\n    {body}\n"
    (shelf.package() / "layers.py").write_text(text)
    namespace: dict = {}
    exec(text, namespace)
    layer = namespace["Layer"]
    plain = type("Plain", (layer.__mro__[1],), {"forward": layer.forward})
    if accepted:
        _validate_layer(check_cls=plain, cls=layer, repo="repo")
        build("tiny-scale", tmp_path / "out", sources=shelf.sources)
    else:
        with pytest.raises(TypeError):
            _validate_layer(check_cls=plain, cls=layer, repo="repo")
        with pytest.raises(BuildRefused, match="layer Layer has"):
            build("tiny-scale", tmp_path / "out", sources=shelf.sources)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[torch-noarch]", "[torch]", r"no \[torch-noarch\] table"),
        ("version = 1", "version = 0", "general.version counts from 1; got 0"),
        ("version = 1", "version = true", "general.version must be int; got True"),
        ('["cpu", "cuda", "tpu"]', '[["cpu"]]', "general.backends must be some of cpu, cuda, tpu"),
        ('[general.hub]\nrepo-id = "pallas-hub/tiny-scale"', "hub = 5", r"\[general.hub\] must hold repo-id"),
        ("version = 1", 'version = "1"', "general.version must be int; got '1'"),
        ('license = "Apache-2.0"\n', "", "general.license must be str; got None"),
        ('name = "tiny-scale"', 'name = "other"', "general.name is 'other' but the folder is called 'tiny-scale'"),
        ('"tpu"]', '"npu"]', "general.backends must be some of cpu, cuda, tpu"),
        ('"tpu"]', '"tpu"]\npython-depends = ["jax"]', r"general.python-depends = \['jax'\] is not supported"),
        ('repo-id = "pallas-hub/tiny-scale"', 'repo-id = "tiny-scale"', "must be 'organisation/name'"),
        ("[general]", "[general", "not valid TOML"),
    ],
)
def test_a_malformed_build_toml_is_refused(shelf: Shelf, old: str, new: str, words: str):
    shelf.edit("build.toml", old, new)
    with pytest.raises(SourceError, match=words):
        read_source("tiny-scale", shelf.sources)


def test_unknown_names_list_what_exists(shelf: Shelf):
    with pytest.raises(SourceError, match=r"no kernel 'nope' in .*Kernels here: absolute-import, bad-layer, no-all"):
        read_source("nope", shelf.sources)
    with pytest.raises(SourceError, match=r"'../x' is not a kernel name"):
        read_source("../x", shelf.sources)


def test_a_link_out_of_the_kernel_is_refused(shelf: Shelf):
    (shelf.package() / "secret.py").symlink_to("/etc/hostname")
    with pytest.raises(SourceError, match=r"secret.py points outside .*a kernel ships only its own files"):
        read_source("tiny-scale", shelf.sources)


@pytest.mark.parametrize("kind", ["a link to nothing", "a pipe"])
def test_what_is_no_file_is_refused(shelf: Shelf, kind: str):
    path = shelf.package() / "odd.py"
    path.symlink_to("nowhere") if kind == "a link to nothing" else os.mkfifo(path)
    with pytest.raises(SourceError, match=r"odd.py is not a plain file \(a link to nothing, a pipe\); remove it"):
        read_source("tiny-scale", shelf.sources)


def test_a_build_toml_that_is_no_text_is_refused(shelf: Shelf):
    (shelf.root / "kernels/tiny-scale/build.toml").write_bytes(b"\xff")
    with pytest.raises(SourceError, match="not valid TOML"):
        read_source("tiny-scale", shelf.sources)


def test_a_card_with_an_unknown_place_is_refused(shelf: Shelf, tmp_path: Path):
    shelf.edit("CARD.md", "{{ layers }}", "{{ weather }}")
    with pytest.raises(BuildRefused, match=r"CARD.md has \{\{ weather \}\}, which nothing fills. Known: backends"):
        build("tiny-scale", tmp_path / "out", sources=shelf.sources)


def test_a_licence_without_text_is_refused(shelf: Shelf, tmp_path: Path):
    shelf.edit("build.toml", "Apache-2.0", "Custom-1.0")
    with pytest.raises(BuildRefused, match=r"license is 'Custom-1.0' and .*LICENSE does not exist"):
        build("tiny-scale", tmp_path / "out", sources=shelf.sources)
    (shelf.root / "kernels/tiny-scale/LICENSE").write_text("Do as you like.\n")
    assert (
        build("tiny-scale", tmp_path / "out", sources=shelf.sources).path / "LICENSE"
    ).read_text() == "Do as you like.\n"


def test_an_interrupted_build_leaves_the_old_one(shelf: Shelf, tmp_path: Path, monkeypatch):
    out = tmp_path / "place/out"
    build("tiny-scale", out, sources=shelf.sources)
    before = tree(out)
    shelf.append("op.py", "\n# newer\n")
    write, written = Path.write_bytes, []

    def fail_at_the_fifth(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail_at_the_fifth)
    with pytest.raises(OSError, match="No space left"):
        build("tiny-scale", out, sources=shelf.sources)
    assert tree(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_folder_that_is_no_build_is_not_replaced(shelf: Shelf, tmp_path: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letters.txt").write_text("dear")
    with pytest.raises(SourceError, match=r"home is not empty and not an earlier build"):
        build("tiny-scale", tmp_path / "home", sources=shelf.sources)
    (tmp_path / "home/build").mkdir()  # many projects have one, with other things in it
    for known in ("README.md", "LICENSE"):
        (tmp_path / "home" / known).write_text("mine")
    for holding, words in (("letters.txt", "it holds letters.txt"), ("build/main.o", "it holds build/main.o")):
        (tmp_path / "home/letters.txt").unlink(missing_ok=True)
        (tmp_path / "home" / holding).write_text("dear")
        with pytest.raises(SourceError, match=rf"not an earlier build \({words}\); choose another folder"):
            build("tiny-scale", tmp_path / "home", sources=shelf.sources)
        assert (tmp_path / "home" / holding).read_text() == "dear"


def test_a_link_to_a_build_keeps_its_name(shelf: Shelf, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for _ in range(2):
        build("tiny-scale", tmp_path / "out", sources=shelf.sources)
        assert (tmp_path / "out").is_symlink()
        assert (tmp_path / "disk/build/torch-cpu/op.py").is_file()


def test_provenance_names_the_last_commit_of_the_sources(shelf: Shelf, tmp_path: Path):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=shelf.root, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def origin() -> dict:
        place = build("tiny-scale", tmp_path / "out", sources=shelf.sources).path
        return json.loads((place / "build/torch-cpu/metadata.json").read_text())["provenance"]

    assert "kernel" not in origin()
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "kernels")
    commit = git("rev-parse", "HEAD")
    (shelf.root / "README.md").write_text("elsewhere")
    git("add", ".")
    git("commit", "--quiet", "-m", "elsewhere")
    assert origin()["kernel"] == {"commit": commit, "dirty": False}
    shelf.append("op.py", "\n# not committed\n")
    assert origin()["kernel"] == {"commit": commit, "dirty": True}


def test_fixture_kernels_are_listed():
    assert {path.name for path in (FIXTURES / "kernels").iterdir()} == {"tiny-scale", *REFUSALS}
