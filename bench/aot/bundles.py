"""Read what the TPU compiler wrote about a kernel's instruction bundles.

A TPU core issues one VLIW bundle per cycle, so the number of bundles in a loop body is the number of cycles one
iteration takes when nothing stalls. Two dump files of libtpu describe the same list of bundles:

    *-final_bundles.txt                              the bundles, with loop depth, labels and branches
    *-final_hlo-static-per-bundle-utilization.txt    one row per bundle: how many slots of each unit it uses

and the kernel's first dump lists its VMEM allocations. All of it is static code: a loop's bundles are counted once,
and waiting for copies is not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pallas_hub.bench.aot.errors import DumpError

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?P<label>[A-Z]{2})?\s*: (?P<depth>[> ]*)\{(?P<code>.*)")
_EXIT_TEST = re.compile(r"scmp\.\w+\.\w+\.totalorder %\w+, (?P<bound>\d+) /\* loop exit test \*/")
_VMEM = re.compile(r"#allocation\d+ \[shape = '[^']*', space=vmem, size = (?P<size>0x[0-9a-f]+)")


@dataclass
class Loop:
    """A loop of the kernel: its own bundles, without those of loops inside it."""

    depth: int
    bundles: int = 0
    matmul: int = 0  # matrix-unit slots used
    matmul_capacity: int = 0  # slots there are in one bundle
    valu: int = 0
    spills: int = 0
    fills: int = 0
    bound: int | None = None  # the constant in the exit test, where there is one
    inner: list[Loop] = field(default_factory=list)

    def walk(self) -> Iterator[Loop]:
        yield self
        for loop in self.inner:
            yield from loop.walk()

    @property
    def total_bundles(self) -> int:
        """Bundles of one iteration, each inner loop counted once."""
        return sum(loop.bundles for loop in self.walk())

    @property
    def total_spills(self) -> int:
        return sum(loop.spills + loop.fills for loop in self.walk())

    @property
    def matmul_share(self) -> float:
        """Share of the matrix units' slots that the iteration uses, each inner loop counted once."""
        slots = self.total_bundles * self.matmul_capacity
        return sum(loop.matmul for loop in self.walk()) / slots if slots else 0.0


@dataclass
class KernelCode:
    """One compiled Pallas kernel. `body` stands for the whole kernel; the grid loop is its longest inner loop."""

    name: str
    body: Loop
    vmem_bytes: int

    @property
    def step(self) -> Loop:
        """The loop over grid steps; a kernel with one grid step has none and is its own step."""
        return max(self.body.inner, key=lambda loop: loop.total_bundles, default=self.body)


def read_kernels(dump: Path) -> list[KernelCode]:
    """Every Pallas kernel in a dump folder, in order of compilation.

    Raises   DumpError: bundle list and utilisation rows differ in number, or a unit's column is missing.
    """
    kernels = []
    for bundles in sorted(dump.glob("*-final_bundles.txt")):
        prefix, _, _ = bundles.name.removesuffix("-final_bundles.txt").rpartition("-")
        first = next(iter(dump.glob(f"{prefix}-*-original.txt")), None)
        if first is not None and _is_kernel(dump, prefix):
            kernels.append(_read_kernel(dump, prefix, bundles, first))
    return kernels


def _is_kernel(dump: Path, prefix: str) -> bool:
    """A Pallas kernel, not an XLA fusion or the program around the kernels (which lists its kernels as well)."""
    if prefix.endswith("-TLP"):
        return False
    schedule = next(iter(dump.glob(f"{prefix}-*-schedule-analysis_final_bundles.txt")), None)
    return schedule is not None and 'custom_call_target="tpu_custom_call"' in schedule.read_text(errors="replace")


def _read_kernel(dump: Path, prefix: str, bundles: Path, first: Path) -> KernelCode:
    table = next(iter(dump.glob(f"{prefix}-*-final_hlo-static-per-bundle-utilization.txt")), None)
    if table is None:
        raise DumpError(f"{prefix}: no per-bundle utilization file")
    units, capacity, rows = _read_utilization(table)
    lines = [match for line in bundles.read_text(errors="replace").splitlines() if (match := _BUNDLE.match(line))]
    if len(lines) != len(rows):
        raise DumpError(f"{prefix}: {len(lines)} bundles but {len(rows)} utilization rows")
    vmem = sum(int(m["size"], 16) for m in _VMEM.finditer(first.read_text(errors="replace")))
    body = _build_loops(lines, units, capacity, rows)
    return KernelCode(name=prefix.split("-", 1)[1].rsplit(".", 1)[0], body=body, vmem_bytes=vmem)


def _read_utilization(path: Path) -> tuple[list[str], list[int], list[list[int]]]:
    lines = path.read_text().splitlines()
    units = [name.strip() for name in lines[1].split(",")]
    missing = {"MATMUL", "VALU", "VLOAD:FILL", "VSTORE:SPILL"} - set(units)
    if missing:
        raise DumpError(f"{path.name}: no column {', '.join(sorted(missing))}")
    capacity = [int(n) for n in lines[2].split()]
    rows = [[int(n) for n in line.split()] for line in lines[4:] if line.strip()]
    return units, capacity, rows


def _build_loops(lines: list[re.Match], units: list[str], capacity: list[int], rows: list[list[int]]) -> Loop:
    column = {name: index for index, name in enumerate(units)}
    slots = capacity[column["MATMUL"]]
    stack = [Loop(depth=0, matmul_capacity=slots)]
    for match, row in zip(lines, rows, strict=True):
        depth = match["depth"].count(">")
        if match["code"].lstrip().startswith("}"):
            depth = stack[-1].depth  # empty bundles are printed without their depth
        if match["label"] in ("LB", "LH"):
            del stack[depth:]  # a new loop at this depth ends its neighbour
        else:
            del stack[depth + 1 :]
        while len(stack) <= depth:
            loop = Loop(depth=len(stack), matmul_capacity=slots)
            stack[-1].inner.append(loop)
            stack.append(loop)
        loop = stack[-1]
        loop.bundles += 1
        loop.matmul += row[column["MATMUL"]]
        loop.valu += row[column["VALU"]]
        loop.spills += row[column["VSTORE:SPILL"]]
        loop.fills += row[column["VLOAD:FILL"]]
        if bound := _EXIT_TEST.search(match["code"]):
            loop.bound = int(bound["bound"])
    return stack[0]
