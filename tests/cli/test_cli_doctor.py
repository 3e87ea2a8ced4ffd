"""The doctor: right verdicts on what it is shown, no hang, no crash, exit code 1 only when something is broken."""

import argparse
import itertools
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from pallas_hub import doctor
from pallas_hub.cli import doctor as command
from pallas_hub.doctor import devices, hub, packages
from pallas_hub.doctor.finding import Finding

GOOD = {
    "torch": "2.13.0+cpu",
    "kernels": "0.17.2",
    "huggingface_hub": "2.4.0",
    "numpy": "2.4.6",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "transformers": "5.22.2",
}


def broken(findings):
    return {finding.name: finding for finding in findings if finding.verdict == "broken"}


def test_tested_versions_are_fine():
    assert broken(packages.check_packages(GOOD, python="3.11.7")) == {}


@pytest.mark.parametrize("missing", ["jax", "transformers", "libtpu", "torch_tpu", "diffusers", "tokamax"])
def test_a_missing_optional_package_is_a_note(missing):
    installed = {name: version for name, version in GOOD.items() if name not in (missing, f"{missing}lib")}
    findings = packages.check_packages(installed, python="3.11.7")
    assert broken(findings) == {}
    note = next(finding for finding in findings if finding.name == missing)
    assert note.verdict == "note"
    assert "(optional)" in note.words
    assert note.mend.startswith("pip install")


@pytest.mark.parametrize(
    ("change", "name", "words", "mend"),
    [
        ({"torch": None}, "torch", "not installed; used for everything", "pip install 'torch==2.13.0'"),
        ({"torch": "2.9.1"}, "torch", "too old; supported: >= 2.13, < 2.14", "pip install 'torch==2.13.0'"),
        ({"kernels": "0.18.2"}, "kernels", "too new; supported: >= 0.17.2, < 0.18", "pip install 'kernels==0.17.2'"),
        (
            {"jaxlib": "0.10.1"},
            "jax and jaxlib",
            "jax 0.10.2 and jaxlib 0.10.1 are not of one release",
            "jaxlib==0.10.2",
        ),
        ({"jaxlib": None}, "jax and jaxlib", "without jaxlib and cannot be imported", "pip install jaxlib==0.10.2"),
        (
            {"transformers": "5.23.0"},
            "transformers and kernels",
            "wants kernels >= 0.18.2 and treats kernels 0.17.2 as not installed",
            "pip install transformers==5.22.2",
        ),
    ],
    ids=["no-torch", "old-torch", "new-kernels", "jaxlib-apart", "no-jaxlib", "transformers-5.23"],
)
def test_broken_versions_and_pairs_come_with_a_mend(change, name, words, mend):
    installed = {k: v for k, v in (GOOD | change).items() if v is not None}
    finding = broken(packages.check_packages(installed, python="3.11.7"))[name]
    assert words in finding.words
    assert mend in finding.mend


def test_an_old_python_is_broken():
    assert packages.check_python("3.10.14").verdict == "broken"
    assert packages.check_python("3.13.1").verdict == "ok"


def test_a_newer_minor_version_is_a_note():
    finding = next(f for f in packages.check_packages(GOOD | {"jax": "0.11.0"}, "3.11.7") if f.name == "jax")
    assert finding.verdict == "note"
    assert "newer than what was tested" in finding.words


def test_supported_kernels_agree_with_the_loader():
    from packaging.specifiers import SpecifierSet

    from pallas_hub.registry.hub import SUPPORTED_KERNELS

    package = next(package for package in packages.PACKAGES if package.name == "kernels")
    assert SpecifierSet(package.supported) == SpecifierSet(SUPPORTED_KERNELS)


def test_supported_ranges_are_those_of_pyproject():
    """Except for Transformers, whose upper end is a matter of the pair with kernels, which has a finding of its own."""
    import re
    import tomllib
    from pathlib import Path

    from packaging.specifiers import SpecifierSet

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {}
    for line in [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]:
        name, rest = re.fullmatch(r"([A-Za-z_-]+)(.*)", line).groups()
        wanted[name.replace("-", "_")] = SpecifierSet(rest)
    assert project["requires-python"] == f">={packages.PYTHON_LOWEST}"
    compared = [package for package in packages.PACKAGES if package.name in wanted and package.name != "transformers"]
    assert {package.name for package in compared} >= {
        "numpy",
        "torch",
        "kernels",
        "huggingface_hub",
        "jax",
        "libtpu",
        "torch_tpu",
    }
    for package in compared:
        assert SpecifierSet(package.supported) == wanted[package.name], package.name


def test_a_probe_that_hangs_is_ended():
    start = time.monotonic()
    with pytest.raises(devices.ProbeFailed, match="no answer within 1 s"):
        devices.run_probe("import time; time.sleep(60)", {}, timeout=1)
    assert time.monotonic() - start < 10


def test_a_probe_that_crashes_is_reported():
    with pytest.raises(devices.ProbeFailed, match=r"exit code 1: ImportError: no driver"):
        devices.run_probe("raise ImportError('no driver')", {})
    with pytest.raises(devices.ProbeFailed, match=r"unexpected answer 'hello"):
        devices.run_probe("print('hello')", {})


def test_a_torch_that_cannot_be_imported_is_broken():
    def probe(code, environ):
        raise devices.ProbeFailed("exit code 1: ImportError: libgomp.so.1 is missing")

    found = broken(devices.check_devices({"torch": "2.13.0", "jax": "0.10.2"}, probe, chips=[]))
    assert found.keys() == {"torch", "jax"}
    assert "libgomp" in found["torch"].words


def test_no_probe_may_initialise_a_tpu():
    seen = {}

    def probe(code, environ):
        seen[code] = environ
        return {"threads": 2, "cuda": [], "cuda_build": None, "cpu": 1, "best": "torch-cpu", "rejected": {}}

    devices.check_devices(GOOD, probe, chips=["v6e"])
    devices.kernels_variant(GOOD, ["v6e"], probe)
    assert len(seen) == 3
    for code, environ in seen.items():
        allowed = {"JAX_PLATFORMS": "cpu"} if "jax" in code else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        assert environ == allowed


def test_a_tpu_without_torch_tpu_is_broken():
    found = broken([devices._tpu(["v6e"] * 4, {"torch": "2.13.0", "jax": "0.10.2", "libtpu": "0.0.52"})])
    assert found["TPU"].value == "4 x v6e"
    assert found["TPU"].mend == "pip install torch_tpu"


def test_tpu_chips_are_read_from_the_pci_bus(tmp_path):
    for slot, vendor, kind in (("0", "0x1ae0", "0x006f"), ("1", "0x1ae0", "0x0042"), ("2", "0x10de", "0x006f")):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(vendor + "\n")
        (tmp_path / slot / "device").write_text(kind + "\n")
    assert devices.tpu_chips(tmp_path) == ["v6e"]  # the second is Google's network card, the third is not Google's


def test_the_choice_on_a_tpu_host_is_explained():
    def probe(code, environ):
        return {"best": "torch-cpu", "rejected": {"torch-tpu": "backend (tpu) does not match"}}

    words = devices.kernels_variant(GOOD, ["v6e"], probe).words
    assert "not torch-tpu: backend (tpu) does not match" in words
    assert "torch.backends.tpu" in words


def test_an_endpoint_that_was_asked_for_and_is_down_is_broken():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        finding = hub.check_endpoint({"HF_ENDPOINT": url}, hub.reach_endpoint)
    assert finding.verdict == "broken"
    assert "does not answer" in finding.words
    assert "HF_ENDPOINT" in finding.mend


def test_the_public_hub_being_unreachable_is_a_note():
    finding = hub.check_endpoint({}, lambda url: "no route")
    assert finding.verdict == "note"
    assert "bundled" in finding.words


def test_offline_mode_makes_no_request():
    def reach(url):
        raise AssertionError("a request was made")

    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HUB_OFFLINE", "True"), ("TRANSFORMERS_OFFLINE", "yes")):
        finding = hub.check_endpoint({name: value, "HF_ENDPOINT": "http://127.0.0.1:9"}, reach)
        assert finding.verdict == "ok"
        assert "offline as asked" in finding.words


def test_an_endpoint_that_answers_is_ok(tmp_path):
    from pallas_hub.registry.server import running_hub

    with running_hub(tmp_path) as running:
        assert hub.check_endpoint({"HF_ENDPOINT": running.url}, hub.reach_endpoint).words == "reachable"


def test_an_endpoint_that_does_not_speak_http_is_broken():
    def answer_garbage():
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"\x00\xffgarbage\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_garbage, daemon=True).start()
        problem = hub.reach_endpoint(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert problem == "it does not speak HTTP (BadStatusLine)"


@pytest.mark.parametrize("url", ["localhost:8787", "file:///etc/hostname", "ftp://hub"])
def test_an_endpoint_that_is_no_url_is_broken(url):
    assert hub.reach_endpoint(url) == "it must be a URL, with http:// or https://"


def test_a_user_without_a_home_has_cache_folders():
    folders = hub.cache_folders({"HF_HOME": "~nobody-of-that-name/hf"})
    assert str(folders["Hub cache"]) == "~nobody-of-that-name/hf/hub"


def test_a_cache_that_is_a_file_is_broken(tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    finding = hub.check_folder(("Hub cache", tmp_path / "cache"))
    assert finding.verdict == "broken"
    assert "HF_HUB_CACHE" in finding.mend


def test_a_cache_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path):
    finding = hub.check_folder(("Hub cache", tmp_path / "new" / "deep"))
    assert finding.verdict == "ok"
    assert "GiB free" in finding.words
    assert list(tmp_path.iterdir()) == []  # nothing was left behind


@pytest.mark.parametrize(("free", "verdict"), [(10 * 2**20, "broken"), (500 * 2**20, "note"), (5 * 2**30, "ok")])
def test_free_space_is_judged(tmp_path, monkeypatch, free, verdict):
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage)
    assert hub.check_folder(("pallas-hub cache", tmp_path)).verdict == verdict


def test_cache_folders_follow_the_libraries(monkeypatch):
    from pathlib import Path

    assert hub.cache_folders({"HF_HOME": "/a"})["Hub cache"] == Path("/a/hub")
    assert hub.cache_folders({"HF_HOME": "/a", "HF_HUB_CACHE": "/b"})["Hub cache"] == Path("/b")
    assert hub.cache_folders({"HF_HUB_CACHE": "/b", "KERNELS_CACHE": "/c"})["Hub cache"] == Path("/c")
    assert hub.cache_folders({"XDG_CACHE_HOME": "/x"})["pallas-hub cache"] == Path("/x/pallas-hub")


def test_variables_that_change_the_path_are_noted():
    assert hub.check_variables({}) == []
    found = hub.check_variables({"PALLAS_HUB_INTERPRET": "1", "PALLAS_HUB_PATH": "torch", "JAX_PLATFORMS": "cpu"})
    assert {f.name: f.verdict for f in found} == {
        "PALLAS_HUB_INTERPRET": "note",
        "PALLAS_HUB_PATH": "note",
        "JAX_PLATFORMS": "ok",
    }
    assert hub.check_variables({"PALLAS_HUB_INTERPRET": "0"}) == []


def test_telemetry_off_breaks_the_kernels_library(monkeypatch):
    """The claim that the doctor makes, seen in the library itself."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers
    from kernels.hf_hub import _get_hf_api

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    api = _get_hf_api()
    headers = build_hf_headers(library_name=api.library_name, user_agent=api.user_agent)
    assert headers["user-agent"].endswith(" ")  # RFC 9110: a field value has no trailing white space
    (finding,) = hub.check_telemetry({"DO_NOT_TRACK": "1"}, "0.17.2")
    assert finding.verdict == "note"
    assert "Illegal header value" in finding.words
    assert hub.check_telemetry({"DO_NOT_TRACK": "1"}, "0.18.2") == []
    assert hub.check_telemetry({"DO_NOT_TRACK": "0"}, "0.17.2") == []


def test_a_broken_finding_without_a_mend_is_our_mistake():
    with pytest.raises(AssertionError, match="must come with its mend"):
        Finding("x", "y", "z", "broken", "words")


def parse(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", *arguments])


@pytest.mark.parametrize("verdict", ["ok", "broken"])
def test_exit_code_and_json_follow_the_findings(monkeypatch, capsys, verdict):
    monkeypatch.setattr(doctor, "diagnose", lambda: [Finding("a", "b", "c", verdict, "words", "the mend")])
    code = command.run(parse("--json"))
    data = json.loads(capsys.readouterr().out)
    assert (code, data["healthy"]) == ((0, True) if verdict == "ok" else (1, False))
    assert data["findings"][0]["verdict"] == verdict
    assert command.run(parse()) == code
    text = capsys.readouterr().out
    assert ("mend: the mend" in text) == (verdict == "broken")
    assert ("1 broken: b" in text) == (verdict == "broken")


def test_the_real_machine_is_diagnosed():
    findings = doctor.diagnose({"HF_HUB_OFFLINE": "1"})
    by_name = {finding.name: finding for finding in findings}
    assert by_name["torch"].verdict == "ok"
    assert by_name["variant picked by kernels"].value == "torch-cpu"
    assert by_name["variant picked by pallas_hub"].value == "torch-cpu"
    assert "threads" in by_name["CPU in torch"].value


def test_it_runs_where_every_package_is_missing(tmp_path):
    """A Python that sees none of the packages: the standard library and pallas_hub are enough."""
    code = """
        import importlib.metadata, sys
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {BLOCKED}:
                    raise ImportError(f"{name} is blocked")
        sys.meta_path.insert(0, Blocker())
        def missing(name):
            raise importlib.metadata.PackageNotFoundError(name)
        importlib.metadata.version = missing
        from pallas_hub import doctor
        findings = doctor.diagnose({"HF_HUB_OFFLINE": "1"})
        print(doctor.text(findings))
    """
    blocked = {"torch", "jax", "jaxlib", "kernels", "huggingface_hub", "transformers", "packaging", "numpy", "yaml"}
    code = textwrap.dedent(code).replace("{BLOCKED}", repr(blocked))
    environ = {"PYTHONPATH": devices._search_path()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "4 broken: torch, huggingface_hub, kernels, numpy" in done.stdout
