"""CONTRIBUTING.md says how to add a kernel; this does what it says, in a copy of the sources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_FILE = re.compile(r"^`(?P<path>kernels/[^`]+)`\n\n```\w+\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMANDS = re.compile(r"^```sh\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
COPIED = (
    "bench",
    "kernels",
    "hub_manifests",
    "pallas_hub",
    "registry",
    "torch_bridge",
    "conftest.py",
    "pyproject.toml",
)


@pytest.fixture
def checkout(tmp_path):
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def test_the_steps_add_a_kernel(checkout):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = {match["path"]: match["text"] for match in _FILE.finditer(text)}
    assert len(files) == 6, sorted(files)
    for path, content in files.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(content)

    (commands,) = (match["text"] for match in _COMMANDS.finditer(text) if "softcap" in match["text"])
    outputs = {line: _run(line, checkout) for line in commands.splitlines()}

    tests = next(output for line, output in outputs.items() if "pytest" in line)
    assert re.search(r"\b18 passed\b", tests)
    assert "failed" not in tests
    assert "softcap" in (checkout / "hub_manifests" / "softcap.toml").read_text()
    published = next(output for line, output in outputs.items() if "publish" in line)
    assert re.search(r"\+ build/torch-tpu/ \(\d+ files\)", published)


def _run(line: str, checkout: Path) -> str:
    """Run one line of the document with this interpreter and with the package of the copy."""
    line = line.replace("python -m", f"{sys.executable} -m").replace(
        "pallas-hub ", f"{sys.executable} -m pallas_hub ", 1
    )
    environment = os.environ | {"PYTHONPATH": str(checkout), "PALLAS_HUB_CACHE": str(checkout / "cache")}
    done = subprocess.run(line, shell=True, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"$ {line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
