"""Devices and build variants, asked in child processes: a driver that hangs or crashes takes the child, not us.

No TPU is initialised, since that takes the chip away from other programs: the PCI bus tells whether there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pallas_hub.doctor.finding import Finding

SECTION = "devices"
PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# PCI device id -> TPU generation, as in jax's own hardware detection.
_TPU_IDS = {
    "0x0027": "v2/v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}

_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "threads": torch.get_num_threads(),
    "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "cuda_build": torch.version.cuda,
    "backends_tpu": hasattr(torch.backends, "tpu"),
}))
"""
_JAX = """
import json, jax
print(json.dumps({"cpu": len(jax.devices("cpu"))}))
"""
_VARIANT = """
import json
from kernels.variants import VariantAccepted, parse_variant, resolve_variant
best, trace = resolve_variant([parse_variant(f"torch-{b}") for b in ("cpu", "cuda", "tpu")])
print(json.dumps({
    "best": best and best.variant_str,
    "rejected": {d.variant.variant_str: d.reason for d in trace if not isinstance(d, VariantAccepted)},
}))
"""
_OURS = """
import json
from pallas_hub.registry.local import choose_backend
from pallas_hub.registry.paths import OUR_SOURCES
from pallas_hub.registry.source import read_source
print(json.dumps({name: "torch-" + choose_backend(read_source(name), None) for name in OUR_SOURCES.names()}))
"""

Probe = Callable[[str, Mapping[str, str]], "dict[str, Any]"]


class ProbeFailed(RuntimeError):
    """The child process crashed, hung or said something else."""


def run_probe(code: str, environ: Mapping[str, str], timeout: float = 60.0) -> dict[str, Any]:
    """Run Python code in a child process with the variables of `environ` on top; return the JSON it printed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": _search_path(), **environ},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(f"no answer within {timeout:.0f} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProbeFailed(f"exit code {done.returncode}: {last}")
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise ProbeFailed(f"unexpected answer {done.stdout[-200:]!r}") from error


def _search_path() -> str:
    """PYTHONPATH under which the child finds the same pallas_hub, installed or not."""
    import pallas_hub

    ours = str(Path(pallas_hub.__file__).absolute().parent.parent)
    return os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))


def tpu_chips(pci: Path = PCI) -> list[str]:
    """Generation of each TPU chip on the PCI bus."""
    chips = []
    for device in sorted(pci.glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and kind in _TPU_IDS:
            chips.append(_TPU_IDS[kind])
    return chips


def check_devices(
    installed: Mapping[str, str], probe: Probe = run_probe, chips: list[str] | None = None
) -> list[Finding]:
    """CPU, CUDA and TPU as torch and jax see them."""
    chips = tpu_chips() if chips is None else chips
    findings = []
    if "torch" in installed:
        findings += _torch_devices(probe, installed)
    if "jax" in installed:
        findings.append(_jax_devices(probe))
    return [*findings, _tpu(chips, installed)]


def _torch_devices(probe: Probe, installed: Mapping[str, str]) -> list[Finding]:
    try:
        seen = probe(_TORCH, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    except ProbeFailed as error:
        mend = f"run `python -c 'import torch'` and mend what it says, or pip install torch=={installed['torch']} again"
        return [Finding(SECTION, "torch", "cannot be used", "broken", str(error), mend)]
    cpu = Finding(SECTION, "CPU in torch", f"{seen['threads']} threads", "ok", "runs the torch path of each kernel")
    if seen["cuda"]:
        words = "runs the torch path of each kernel"
        return [cpu, Finding(SECTION, "CUDA in torch", ", ".join(seen["cuda"]), "ok", words)]
    build = f"torch is built for CUDA {seen['cuda_build']}" if seen["cuda_build"] else "torch is built without CUDA"
    return [cpu, Finding(SECTION, "CUDA in torch", "none", "ok", build)]


def _jax_devices(probe: Probe) -> Finding:
    try:
        seen = probe(_JAX, {"JAX_PLATFORMS": "cpu"})
    except ProbeFailed as error:
        mend = "run `JAX_PLATFORMS=cpu python -c 'import jax'` and mend what it says"
        return Finding(SECTION, "jax", "cannot be used", "broken", str(error), mend)
    plugins = [name for name in ("jax_cuda12_plugin", "jax_cuda13_plugin") if find_spec(name)]
    words = f"CUDA plugin: {', '.join(plugins) or 'none'}"
    return Finding(SECTION, "CPU in jax", f"{seen['cpu']} device", "ok", words)


def _tpu(chips: list[str], installed: Mapping[str, str]) -> Finding:
    in_torch = f"torch_tpu {installed['torch_tpu']}" if "torch_tpu" in installed else "no torch_tpu"
    in_jax = f"libtpu {installed['libtpu']}" if "libtpu" in installed else "no libtpu"
    if not chips:
        able = "kernels can be compiled for TPUs, not run" if "libtpu" in installed else "nothing to run or compile"
        return Finding(SECTION, "TPU", "no chip on the PCI bus", "ok", f"{in_torch}, {in_jax}: {able}")
    value = f"{len(chips)} x {', '.join(dict.fromkeys(chips))}"
    missing = [name for name in ("torch_tpu", "libtpu", "jax") if name not in installed]
    if missing:
        words = f"{in_torch}, {in_jax}: torch cannot use the chips"
        return Finding(SECTION, "TPU", value, "broken", words, f"pip install {' '.join(missing)}")
    return Finding(SECTION, "TPU", value, "ok", f"{in_torch}, {in_jax}; found on the PCI bus, not initialised")


def kernels_variant(installed: Mapping[str, str], chips: list[str], probe: Probe = run_probe) -> Finding:
    """The build variant that the `kernels` library picks of torch-cpu, torch-cuda and torch-tpu."""
    name = "variant picked by kernels"
    if "torch" not in installed or "kernels" not in installed:
        return Finding("variants", name, "none", "note", "needs torch and kernels installed")
    try:
        seen = probe(_VARIANT, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    except ProbeFailed as error:
        mend = "run `python -c 'import kernels'` and mend what it says"
        return Finding("variants", name, "unknown", "broken", str(error), mend)
    words = "; ".join(f"not {variant}: {reason}" for variant, reason in seen["rejected"].items())
    if chips and seen["best"] != "torch-tpu":
        words += ". This host has a TPU, which kernels recognises by torch.backends.tpu only; every pallas-hub variant "
        words += "holds the same code and decides by the tensor's device, so this choice works"
    return Finding("variants", name, seen["best"] or "none", "ok", words)


def our_variant(installed: Mapping[str, str], probe: Probe = run_probe) -> Finding:
    """The build variant that pallas_hub takes of its bundled kernels; from a Hub it takes what kernels picks."""
    name = "variant picked by pallas_hub"
    if "torch" not in installed:
        return Finding("variants", name, "none", "note", "needs torch installed")
    try:
        seen = probe(_OURS, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    except ProbeFailed as error:
        mend = "install pallas-hub again: its bundled kernels cannot be read"
        return Finding("variants", name, "unknown", "broken", str(error), mend)
    if not seen:
        mend = "install pallas-hub again, or run from a whole checkout"
        return Finding("variants", name, "none", "broken", "no bundled kernels found", mend)
    words = f"of the bundled {', '.join(seen)}, by how torch was built; from a Hub, the one that kernels picks. "
    words += "All variants hold the same code and decide by the tensor's device"
    return Finding("variants", name, ", ".join(sorted(set(seen.values()))), "ok", words)
