"""Versions: what is installed, what this release was tested with, and which pairs do not fit."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from pallas_hub.doctor.finding import Finding
from pallas_hub.layers import compat

SECTION = "packages"


@dataclass(frozen=True)
class Package:
    """`lowest` is the oldest version that can work; `below`, where given, the first that is known not to."""

    name: str
    lowest: str
    tested: str
    use: str
    required: bool = False
    below: str | None = None

    @property
    def supported(self) -> str:
        return f">= {self.lowest}" + (f", < {self.below}" if self.below else "")


PYTHON_LOWEST = "3.11"
# As in pyproject.toml; a test compares the two.
PACKAGES = (
    Package("torch", "2.13", "2.13.0", "everything", required=True, below="2.14"),
    Package("huggingface_hub", "2.4", "2.4.0", "downloading and publishing", required=True, below="3"),
    Package("kernels", "0.17.2", "0.17.2", "loading kernels from a Hub", required=True, below="0.18"),
    Package("numpy", "2", "2.4", "exchange of arrays", required=True),
    Package("jax", "0.10.2", "0.10.2", "the Pallas kernels: on TPU, interpreted, compiled", below="0.13"),
    Package("jaxlib", "0.10.2", "0.10.2", "the Pallas kernels: on TPU, interpreted, compiled", below="0.13"),
    Package("libtpu", "0.0.52", "0.0.52", "compiling for TPUs, with or without one"),
    Package("torch_tpu", "0.2", "0.2.0", "torch tensors on a TPU", below="0.3"),
    Package("transformers", "5.20", "5.22.2", "kernelize on Transformers models"),
    Package("diffusers", "0.38", "0.42.1", "kernelize on Diffusers pipelines", below="0.43"),
    Package("starlette", "1", "1.10", "pallas-hub serve and demo", below="2"),
    Package("uvicorn", "0.50", "0.54", "pallas-hub serve and demo"),
    Package("dulwich", "1.2", "1.2", "pallas-hub serve and demo", below="2"),
    Package("matplotlib", "3.10", "3.11", "pallas-hub bench --plot"),
    Package("tabulate", "0.9", "0.10", "the kernels benchmark command"),
    Package("tokamax", "0.0.12", "0.0.12", "kernel repos made of Tokamax ops, TPU compile reports", below="0.1"),
)


def installed_versions() -> dict[str, str]:
    """Package name -> version, for those of PACKAGES that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package.name] = metadata.version(package.name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_packages(installed: Mapping[str, str], python: str | None = None) -> list[Finding]:
    """One finding per package, then the pairs that do not fit."""
    findings = [check_python(python or platform.python_version())]
    findings += [check_package(package, installed.get(package.name)) for package in PACKAGES]
    return findings + check_pairs(installed)


def check_python(version: str) -> Finding:
    if numbers(version) >= numbers(PYTHON_LOWEST):
        return Finding(SECTION, "Python", version, "ok", f"supported: >= {PYTHON_LOWEST}")
    words = f"supported: >= {PYTHON_LOWEST}"
    return Finding(SECTION, "Python", version, "broken", words, f"make the environment with Python {PYTHON_LOWEST}")


def check_package(package: Package, version: str | None) -> Finding:
    install = f"pip install '{package.name}=={package.tested}'"
    if version is None:
        words = f"not installed; used for {package.use}"
        if package.required:
            return Finding(SECTION, package.name, "missing", "broken", words, install)
        return Finding(SECTION, package.name, "missing", "note", f"{words} (optional)", install)
    words = f"supported: {package.supported}; tested with {package.tested}"
    if numbers(version) < numbers(package.lowest):
        return Finding(SECTION, package.name, version, "broken", f"too old; {words}", install)
    if package.below and numbers(version) >= numbers(package.below):
        return Finding(SECTION, package.name, version, "broken", f"too new; {words}", install)
    if numbers(version)[:2] > numbers(package.tested)[:2]:
        return Finding(SECTION, package.name, version, "note", f"newer than what was tested; {words}")
    return Finding(SECTION, package.name, version, "ok", words)


def check_pairs(installed: Mapping[str, str]) -> list[Finding]:
    """Versions that are fine alone and do not work together."""
    findings = []
    if "transformers" in installed:
        problem = compat.diagnose(installed["transformers"], installed.get("kernels"))
        pair = f"{installed['transformers']} with {installed.get('kernels', 'none')}"
        findings.append(_pair("transformers and kernels", pair, problem))
    if "jax" in installed or "jaxlib" in installed:
        problem = diagnose_jax(installed.get("jax"), installed.get("jaxlib"))
        pair = f"{installed.get('jax', 'none')} with {installed.get('jaxlib', 'none')}"
        findings.append(_pair("jax and jaxlib", pair, problem))
    return findings


def _pair(name: str, value: str, problem: str | None) -> Finding:
    if problem is None:
        return Finding("pairs", name, value, "ok", "work together")
    words, _, mend = problem.partition(" Try: ")
    return Finding("pairs", name, value, "broken", words, mend)


def diagnose_jax(jax: str | None, jaxlib: str | None) -> str | None:
    """jax refuses a jaxlib that is newer than itself or of another minor version."""
    if jax is None:
        return f"jaxlib {jaxlib} is installed without jax. Try: pip install jax=={jaxlib}"
    if jaxlib is None:
        return f"jax {jax} is installed without jaxlib and cannot be imported. Try: pip install jaxlib=={jax}"
    if numbers(jax)[:3] != numbers(jaxlib)[:3]:
        return f"jax {jax} and jaxlib {jaxlib} are not of one release. Try: pip install jax=={jax} jaxlib=={jax}"
    return None


def numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0); what is no number ends it."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
