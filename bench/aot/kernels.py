"""Reports of this project's kernels and of their peers: which programs are compiled, and which rows are shown."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_hub.bench.aot import moe_peers
from pallas_hub.bench.aot.programs import Workload, find_program, kernel_programs
from pallas_hub.bench.aot.report import Report, build_report, check_targets
from pallas_hub.bench.aot.runner import DEFAULT_TIMEOUT_S, Job, require_libtpu, run_jobs

IMPLS = {
    "ours": "ours",
    "products": "two ragged dots",
    "jax": "megablox",
    "jax-paged": "ragged paged attention",
    "jax-splash": "splash",
    "jax-flash": "jax flash",
    "tokamax": "tokamax",
    "lax": "lax.ragged_dot",
    "xla": "XLA",
    "xla-kernel": "XLA, kernel option",
    "batched_mm": "batched_mm",
    **moe_peers.NAMES,
}


@dataclass(frozen=True)
class Row:
    """One line of the table: who computed which op of which case, with which blocks, and the report."""

    kernel: str
    workload: Workload
    impl: str
    blocks: dict[str, int] | None
    report: Report
    same_tile: bool = False  # a peer at our blocks, as against its own best
    tried: int = 1  # tilings that the row is the best of


@dataclass(frozen=True)
class Wish:
    """A job and what it is for."""

    kernel: str
    workload: Workload
    target: str
    impl: str
    blocks: dict[str, int] | None
    first: bool  # the first tiling of a search is ours

    @property
    def program(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "op": self.workload.op,
            "case": self.workload.case,
            "impl": self.impl,
            "blocks": self.blocks,
        }


def choose_workloads(
    kernel: str, names: Sequence[str] = (), ops: Sequence[str] = (), shapes: Sequence[str] = ()
) -> list[Workload]:
    """Those of the kernel whose case name contains one of `names`, and whose op is in `ops`; all when these are empty.

    `shapes` are cases of the user's own ('m=4096,n=5120'); with some, the kernel's own cases are there only by name.
    Raises   ValueError: nothing matches, or a shape is not in the kernel's letters; the message lists what there is.
    """
    module = kernel_programs(kernel)
    everything = module.cases()
    for op in ops:
        if op not in module.OPS:
            raise ValueError(f"{kernel} has no op {op!r}; there are: {', '.join(module.OPS)}.")
    for name in names:
        if not any(name in workload.case for workload in everything):
            cases = dict.fromkeys(workload.case for workload in everything)
            raise ValueError(f"{kernel} has no workload {name!r}; there are: {', '.join(cases)}.")
    for shape in shapes:
        module.shape_case(shape)
    own = [Workload(op, shape) for shape in dict.fromkeys(shapes) for op in module.OPS]
    named = [
        workload for workload in everything if any(name in workload.case for name in names) or not (names or shapes)
    ]
    return [workload for workload in (*named, *own) if not ops or workload.op in ops]


def report_kernel(
    kernel: str,
    workloads: Sequence[Workload],
    targets: Sequence[str],
    *,
    versus: Sequence[str] = (),
    workers: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    cache: Path | None = None,
    on_done: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """Compile our kernel and the peers in `versus` on every workload and target; peers at our blocks and at their best.

    `on_done(line, done, all)` is called as each program ends.
    Raises   ValueError: unknown kernel, target or peer.  LibtpuMissing
    """
    require_libtpu()
    check_targets(targets)
    module = kernel_programs(kernel)
    peers = _peers(module, kernel, versus)
    wishes = [
        Wish(kernel, workload, target, impl, blocks, index == 0)
        for workload in workloads
        for target in targets
        for impl in ("ours", *peers)
        for index, blocks in enumerate(_blocks(module, workload, target, impl))
    ]
    options: dict[str, Any] = {"workers": workers, "timeout_s": timeout_s, "cache": cache, "on_done": on_done}
    # A search is decided by the kernels alone: what XLA does around them is estimated for the rows that are shown.
    chosen = _choose(wishes, compile_wishes(wishes, around=False, **options))
    reports = compile_wishes([wish for wish, _ in chosen], **options)
    return [
        Row(kernel, wish.workload, wish.impl, wish.blocks, report, wish.first and tried != 1, max(tried, 1))
        for (wish, tried), report in zip(chosen, reports, strict=True)
    ]


def own_wish(kernel: str, workload: Workload, target: str) -> Wish:
    """Our kernel with the blocks that it takes by itself."""
    blocks = kernel_programs(kernel).own_blocks(workload.op, workload.case, target)
    return Wish(kernel, workload, target, "ours", blocks, True)


def compile_wishes(
    wishes: Sequence[Wish],
    *,
    around: bool = True,
    workers: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    cache: Path | None = None,
    on_done: Callable[[str, int, int], None] | None = None,
) -> list[Report]:
    require_libtpu()
    programs = [find_program(wish.program) for wish in wishes]
    jobs = [
        Job(wish.target, wish.program, program.options, _label(wish), around)
        for wish, program in zip(wishes, programs, strict=True)
    ]
    done = 0

    def report_progress(job: Job, result: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if on_done is not None:
            on_done(f"{job.label} {job.target}: {result['status']}", done, len(jobs))

    results = run_jobs(jobs, workers=workers, timeout_s=timeout_s, cache=cache, on_done=report_progress)
    return [
        build_report(job, result, least_bytes=program.least_bytes, flops=program.flops, notes=_notes(wish, program))
        for wish, job, result, program in zip(wishes, jobs, results, programs, strict=True)
    ]


def _peers(module: Any, kernel: str, versus: Sequence[str]) -> list[str]:
    # Every kernel has a peer "xla"; for experts layers it is told by the function that XLA expands.
    versus = ["lax" if name == "xla" and "lax" in module.PEERS else name for name in versus]
    known = dict.fromkeys(name for peer in module.PEERS for name in (peer.partition("-")[0], peer))
    for name in versus:
        if name not in known:
            raise ValueError(f"--vs for {kernel} must be among {', '.join(known)}; got {name!r}.")
        if name.startswith("tokamax") and importlib.util.find_spec("tokamax") is None:
            raise ValueError("--vs tokamax needs tokamax; try `pip install tokamax==0.0.12`.")
        if name in moe_peers.PEERS and not moe_peers.installed():
            raise ValueError(f"--vs {name} needs tokamax 0.0.17 or newer, which needs Python 3.12; {moe_peers.MEND}")
    left_out = () if moe_peers.installed() else moe_peers.PEERS
    wanted = [peer for peer in module.PEERS if peer in versus or peer.partition("-")[0] in versus]
    return [peer for peer in wanted if peer not in left_out]


def _blocks(module: Any, workload: Workload, target: str, impl: str) -> list[dict[str, int] | None]:
    if impl == "ours":
        return [module.own_blocks(workload.op, workload.case, target)]
    return module.peer_blocks(workload.op, workload.case, target, impl)


def _notes(wish: Wish, program: Any) -> list[str]:
    notes = [program.note] if program.note else []
    if program.counted_as:
        notes.append(program.counted_note)
    module = kernel_programs(wish.kernel)
    if wish.kernel == "moe-experts" and wish.impl == "ours" and not wish.blocks:
        notes.append("no blocks: these sizes run as two ragged dots, which choose their own")
    if wish.impl == "ours" and wish.blocks is not None and hasattr(module, "default_blocks"):
        default = module.default_blocks(wish.workload.op, wish.workload.case, wish.target)
        if wish.blocks != default:
            notes.append(f"tuned blocks; the default is {_tile(default)}")
    return notes


def _label(wish: Wish) -> str:
    return " ".join(filter(None, [wish.workload.case, wish.workload.op, IMPLS[wish.impl], _tile(wish.blocks or {})]))


def _tile(blocks: dict[str, int]) -> str:
    return "x".join(str(v) for k, v in blocks.items() if k.startswith("block_"))


def _choose(wishes: Sequence[Wish], reports: Sequence[Report]) -> list[tuple[Wish, int]]:
    """Ours; each peer at our blocks and, where that is another tiling, at its best by modelled time.

    Returns  the chosen, each with the number of tilings it is the best of; 0 for one that is not the best
    """
    groups: dict[Any, list[tuple[Wish, Report]]] = {}
    for wish, report in zip(wishes, reports, strict=True):
        groups.setdefault((wish.workload, wish.target, wish.impl), []).append((wish, report))
    chosen = []
    for group in groups.values():
        best = min(group, key=lambda pair: (pair[1].kernel_us is None, pair[1].kernel_us or 0.0, not pair[0].first))[0]
        chosen += [(wish, len(group) if wish is best else 0) for wish, _ in group if wish.first or wish is best]
    return chosen
