"""Read what the TPU compiler wrote about a kernel's instruction bundles.

A TPU core issues one VLIW bundle per cycle, so the bundles that a grid step runs are the cycles it takes when nothing
stalls. Two dump files of libtpu describe the same list of bundles:

    *-final_bundles.txt                              the bundles, with loop depth, labels and branches
    *-final_hlo-static-per-bundle-utilization.txt    one row per bundle: how many slots of each unit it uses

and the kernel's first dump lists its VMEM allocations. Three things turn static code into bundles per step:

    loops        a bundle counts as often as the constant loops around it, inside the step, go round
    either/or    of two branches under opposite conditions only the longer one counts
    once         what a branch skips unless the step's number is a certain constant (clearing on the first step) is no
                 part of a step: it is reported apart
    conditional  what else a branch may skip counts, and is also reported apart: a last step needs some of it

Where a chip has two cores, the compiler may give each of them half of a `parallel` grid axis. Then the code waits for
the other core at its start and end, and its grid loop goes round half as often. Waiting for copies is not in it.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from pallas_hub.bench.aot.errors import DumpError

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?P<label>[A-Z]{2})?\s*: (?P<depth>[> ]*)\{(?P<code>.*)", re.DOTALL)
_EXIT_TEST = re.compile(
    r"%(?P<result>p\d+)_\w+ = scmp\.\w+\.\w+\.totalorder (?:\(%(?P<inner>p\d+)_\w+\), )?"
    r"%(?P<counter>\w+), (?P<bound>\d+)"
    r" /\* loop exit test \*/"
)
_ADDITION = re.compile(r"%(?P<result>\w+) = sadd\.s32 (?P<number>\d+), %")
_COMPARE = re.compile(
    r"%(?P<result>p\d+)_\w+ = scmp\.(?P<how>\w+)\.(?P<type>\w+)\.totalorder (?P<operands>%\w+, [%\w]+)"
)
_BRANCH = re.compile(r"sbr\.rel \((?P<negated>!?)%(?P<predicate>p\d+)_\w+\) target = \$region(?P<target>\d+)")
# A step's number, as the pipeline around the kernel's body counts it; the name is told where it is computed.
_STEP_NUMBER = re.compile(r"%(s\d+)_s\d+ = [^;{}]*?/\* [^*]*iteration index, stage = ")
_VMEM = re.compile(r"#allocation\d+ \[shape = '[^']*', space=vmem, size = (?P<size>0x[0-9a-f]+)")
_OPPOSITE = {"gt": "le", "le": "gt", "ge": "lt", "lt": "ge", "eq": "ne", "ne": "eq"}
_TWO_CORES = "BarrierMegacore"
_PIPELINE_ROUNDS = 2  # the grid loop goes round so many more times than there are steps, for the copies in flight
_DELAY_SLOTS = 4  # bundles after a branch that run whether or not it is taken


@dataclass(frozen=True)
class Code:
    """What one pass through a stretch of code issues."""

    bundles: int
    conditional: int = 0  # of these, bundles that a branch may skip
    matmul: int = 0  # matrix-unit slots used
    matmul_slots: int = 0  # matrix-unit slots there are in these bundles
    spills: int = 0  # vector registers stored to VMEM for want of registers
    fills: int = 0  # and loaded back
    unknown_loops: int = 0  # loops without a constant bound, counted as going round once
    once: int = 0  # bundles that one of the steps issues beside these


@dataclass(frozen=True)
class KernelCode:
    """One compiled Pallas kernel: a whole run of it, and one round of its outermost loop where it has one."""

    name: str
    vmem_bytes: int
    whole: Code
    step: Code | None
    cores: int = 1  # that share the steps of the grid
    core_steps: int | None = None  # steps of one core, if that loop is the grid's; None where that is not constant


@dataclass(eq=False)
class _Loop:
    bound: int | None = None


@dataclass
class _Bundle:
    label: str | None
    depth: int
    code: str
    used: dict[str, int] = field(default_factory=dict)
    loops: tuple[_Loop, ...] = ()  # around it, outermost first


_Region = tuple[int, int, str]  # first bundle, last bundle, the predicate under which a branch skips them


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


def _read_kernel(dump: Path, prefix: str, path: Path, first: Path) -> KernelCode:
    table = next(iter(dump.glob(f"{prefix}-*-final_hlo-static-per-bundle-utilization.txt")), None)
    if table is None:
        raise DumpError(f"{prefix}: no per-bundle utilization file")
    capacity, rows = _read_utilization(table)
    bundles = _read_bundles(path)
    if len(bundles) != len(rows):
        raise DumpError(f"{prefix}: {len(bundles)} bundles but {len(rows)} utilization rows")
    for bundle, row in zip(bundles, rows, strict=True):
        bundle.used = row
    vmem = sum(int(m["size"], 16) for m in _VMEM.finditer(first.read_text(errors="replace")))
    whole, step, rounds = summarize(bundles, capacity["MATMUL"])
    cores = 2 if any(_TWO_CORES in bundle.code for bundle in bundles) else 1
    core_steps = None if rounds is None else rounds - _PIPELINE_ROUNDS
    return KernelCode(prefix.split("-", 1)[1].rsplit(".", 1)[0], vmem, whole, step, cores, core_steps)


def _read_bundles(path: Path) -> list[_Bundle]:
    bundles: list[_Bundle] = []
    for line in path.read_text(errors="replace").splitlines():
        if (match := _BUNDLE.match(line)) is None:
            if bundles:
                bundles[-1].code += line  # comments may hold line breaks
            continue
        depth = match["depth"].count(">")
        if match["code"].lstrip().startswith("}") and bundles:
            depth = bundles[-1].depth  # empty bundles are printed without their depth
        bundles.append(_Bundle(match["label"], depth, match["code"]))
    return bundles


def _read_utilization(path: Path) -> tuple[dict[str, int], list[dict[str, int]]]:
    lines = path.read_text().splitlines()
    units = [name.strip() for name in lines[1].split(",")]
    missing = {"MATMUL", "VLOAD:FILL", "VSTORE:SPILL"} - set(units)
    if missing:
        raise DumpError(f"{path.name}: no column {', '.join(sorted(missing))}")
    capacity = dict(zip(units, (int(n) for n in lines[2].split()), strict=False))
    rows = [dict(zip(units, map(int, line.split()), strict=False)) for line in lines[4:] if line.strip()]
    return capacity, rows


def summarize(bundles: list[_Bundle], matmul_capacity: int) -> tuple[Code, Code | None, int | None]:
    """A whole run; one round of the grid loop, which is the outermost loop with the most bundles; how many rounds."""
    _find_loops(bundles)
    regions = _find_regions(bundles)
    skipped, first_only = _skipped_arms(bundles, regions), _of_one_step(bundles, regions)
    outermost = dict.fromkeys(bundle.loops[0] for bundle in bundles if bundle.loops)
    whole = _count(bundles, None, set(), regions, skipped, [], matmul_capacity)
    steps = [
        (_count(bundles, loop, {loop}, regions, skipped, first_only, matmul_capacity), loop.bound) for loop in outermost
    ]
    step, rounds = max(steps, key=lambda step: step[0].bundles, default=(None, None))
    return whole, step, rounds


def _find_loops(bundles: list[_Bundle]) -> None:
    stack: list[_Loop] = []
    left: dict[int, _Loop] = {}  # depth -> the loop last seen there
    depth_of: dict[str, int] = {}  # predicate of an exit test -> depth of its loop
    added = {m["result"]: int(m["number"]) for bundle in bundles for m in _ADDITION.finditer(bundle.code)}
    for bundle in bundles:
        del stack[bundle.depth :]
        if bundle.label in ("LB", "LH") and bundle.depth:
            del stack[bundle.depth - 1 :]
            left = {depth: loop for depth, loop in left.items() if depth < len(stack)}
        while len(stack) < bundle.depth:
            # Without a label it is the same loop: its last bundles are mixed with those that follow it.
            stack.append(left.get(len(stack)) or _Loop())
        left.update(enumerate(stack))
        bundle.loops = tuple(stack)
        for test in _EXIT_TEST.finditer(bundle.code):
            # The last round of an inner loop may hold the test of the loop around it, under the inner test's predicate.
            depth = depth_of[test["inner"]] - 1 if test["inner"] in depth_of else len(stack)
            depth_of[test["result"]] = depth
            if 0 < depth <= len(stack):
                stack[depth - 1].bound = -(-int(test["bound"]) // max(1, added.get(test["counter"], 1)))


def _find_regions(bundles: list[_Bundle]) -> list[_Region]:
    """(first, last, predicate) of each stretch that a forward branch can skip."""
    ends = {n: i for i, b in enumerate(bundles) for n in re.findall(r"Start/End empty region (\d+)", b.code)}
    regions = []
    for i, bundle in enumerate(bundles):
        branch = _BRANCH.search(bundle.code)
        end = ends.get(branch["target"], -1) if branch else -1
        if branch and end > i:
            # TPU7x has fewer delay slots; where a loop begins among them, it is skipped from its start.
            slots = range(i + 1, min(i + 1 + _DELAY_SLOTS, end))
            start = next((n for n in slots if bundles[n].depth > bundle.depth), i + 1 + _DELAY_SLOTS)
            regions.append((start, end - 1, branch["negated"] + branch["predicate"]))
    return [region for region in regions if region[1] >= region[0]]


def _skipped_arms(bundles: list[_Bundle], regions: list[_Region]) -> list[tuple[int, int]]:
    """The shorter of each two neighbouring regions under opposite conditions: one step runs one of them."""
    compares = {m["result"]: m for bundle in bundles for m in _COMPARE.finditer(bundle.code)}

    def condition(predicate: str) -> tuple[str, str, str] | None:
        if (compare := compares.get(predicate.lstrip("!"))) is None:
            return None
        how = _OPPOSITE.get(compare["how"], "") if predicate.startswith("!") else compare["how"]
        return how, compare["type"], compare["operands"]

    skipped = []
    for one, other in itertools.pairwise(regions):
        a, b = condition(one[2]), condition(other[2])
        if a and b and one[1] < other[0] and a[1:] == b[1:] and _OPPOSITE.get(a[0]) == b[0]:
            shorter = min(one, other, key=lambda region: region[1] - region[0])
            skipped.append(shorter[:2])
    return skipped


def _of_one_step(bundles: list[_Bundle], regions: list[_Region]) -> list[tuple[int, int]]:
    """Regions that a branch skips unless the step's number equals a constant."""
    numbers = {name for bundle in bundles for name in _STEP_NUMBER.findall(bundle.code)}
    compares = {m["result"]: m for bundle in bundles for m in _COMPARE.finditer(bundle.code)}
    found = []
    for start, end, predicate in regions:
        compare = compares.get(predicate.lstrip("!"))
        if compare is None:
            continue
        left, right = compare["operands"].split(", ")
        skips_unequal = compare["how"] == ("eq" if predicate.startswith("!") else "ne")
        if skips_unequal and right.isdigit() and left.lstrip("%").split("_")[0] in numbers:
            found.append((start, end))
    return found


def _count(
    bundles: list[_Bundle],
    around: _Loop | None,
    once: set[_Loop],
    regions: list[_Region],
    skipped: list[tuple[int, int]],
    first_only: list[tuple[int, int]],
    matmul_capacity: int,
) -> Code:
    """Issue counts of one round of the loop `around`, or of everything; the loops in `once` count as one round."""
    weights = []
    for bundle in bundles:
        repeats = math.prod(loop.bound or 1 for loop in bundle.loops if loop not in once)
        weights.append(repeats if around is None or around in bundle.loops else 0)
    for start, end in skipped:
        weights[start : end + 1] = [0] * (end + 1 - start)
    apart = 0
    for start, end in first_only:
        apart += sum(weights[start : end + 1])
        weights[start : end + 1] = [0] * (end + 1 - start)
    total = sum(weights)
    maybe: set[int] = set()
    for start, end, _ in regions:
        if sum(weights[start : end + 1]) * 2 < total:  # the longest part of a step is what the step is for
            maybe.update(range(start, end + 1))
    unbounded = {loop for bundle, w in zip(bundles, weights, strict=True) if w for loop in bundle.loops}

    def used(unit: str) -> int:
        return sum(w * bundle.used.get(unit, 0) for w, bundle in zip(weights, bundles, strict=True))

    return Code(
        bundles=total,
        conditional=sum(weights[i] for i in maybe),
        matmul=used("MATMUL"),
        matmul_slots=total * matmul_capacity,
        spills=used("VSTORE:SPILL"),
        fills=used("VLOAD:FILL"),
        unknown_loops=sum(loop.bound is None for loop in unbounded - once),
        once=apart,
    )
