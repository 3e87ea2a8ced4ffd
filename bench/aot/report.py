"""One program on one TPU generation: what was compiled, what was counted, what is modelled from the two.

    model time of a kernel = max(bytes / HBM bandwidth, steps * bundles per step / clock) + fill
    fill                   = copying in the first blocks and out the last ones, which nothing overlaps

It is a best case. Where the first term is the larger one, it equals the roofline by construction and is no proof of
speed; it tells good block sizes from bad ones, not good from good. docs/aot.md has its calibration and its limits.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_hub.bench.aot.hardware import HARDWARE, Hardware
from pallas_hub.bench.aot.program import export_program
from pallas_hub.bench.aot.runner import DEFAULT_TIMEOUT_S, Job, run_jobs
from pallas_hub.bench.aot.surroundings import without_kernels
from pallas_hub.bench.aot.traffic import Traffic, TrafficUnknown, count_traffic


@dataclass(frozen=True)
class KernelReport:
    """One Pallas kernel of a program.

    compiled   vmem_bytes, step_bundles, matmul_share, spills, fills
    counted    steps, bytes (None where the kernel makes its own copies)
    modelled   time_us (None where bytes or steps are unknown)
    """

    name: str
    vmem_bytes: int
    step_bundles: int
    matmul_share: float
    spills: int
    fills: int
    steps: int | None
    bytes: int | None
    fill_bytes: int
    time_us: float | None


@dataclass(frozen=True)
class Report:
    """A program on one target. `status` and `reason` are those of `bench.aot.runner`."""

    label: str
    target: str
    status: str
    reason: str = ""
    compile_seconds: float | None = None
    cached: bool = False
    kernels: tuple[KernelReport, ...] = ()
    xla_us: float | None = None
    xla_operations: int = 0
    least_bytes: int | None = None
    flops: int | None = None
    hbm_temporary_bytes: int | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def hardware(self) -> Hardware:
        return HARDWARE[self.target]

    @property
    def spills(self) -> int:
        return sum(kernel.spills for kernel in self.kernels)

    @property
    def bytes(self) -> int | None:
        counts = [kernel.bytes for kernel in self.kernels]
        return None if None in counts or not counts else sum(count for count in counts if count is not None)

    @property
    def kernel_us(self) -> float | None:
        times = [kernel.time_us for kernel in self.kernels]
        return None if None in times or not times else sum(time for time in times if time is not None)

    @property
    def time_us(self) -> float | None:
        """Kernels and the XLA operations around them, one after the other."""
        if self.kernel_us is None:
            return self.xla_us if not self.kernels else None
        return self.kernel_us + (self.xla_us or 0.0)

    @property
    def roofline_us(self) -> float | None:
        """The least time the hardware allows: least bytes through HBM, or the operations through the matrix units."""
        if self.least_bytes is None:
            return None
        compute = (self.flops or 0) / self.hardware.bf16_tflop_s / 1e6
        return max(self.hardware.bandwidth_us(self.least_bytes), compute)

    @property
    def roofline_share(self) -> float | None:
        if self.roofline_us is None or not self.time_us:
            return None
        return self.roofline_us / self.time_us


def compile_report(
    fn: Callable,
    args: Sequence[Any],
    *,
    target: str | Sequence[str] = "v6e",
    label: str = "",
    least_bytes: int | None = None,
    flops: int | None = None,
    options: dict[str, str | bool] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    cache: Path | None = None,
    **static: Any,
) -> Any:
    """Compile `fn(*args, **static)` for real TPUs, on a machine without one, and report on it.

    Shapes   args: `jax.ShapeDtypeStruct` (or any array) where shape and dtype are all that counts; numpy arrays where
             the traffic depends on the values, such as group sizes
    Units    least_bytes in bytes, flops in floating-point operations: for the roofline
    Returns  a Report; a list of them, in order, when `target` is a sequence
    Raises   what tracing `fn` raises; ValueError: unknown target. What the TPU compiler refuses is in the report.
    """
    targets = [target] if isinstance(target, str) else list(target)
    for name in targets:
        if name not in HARDWARE:
            raise ValueError(f"compile_report: target must be one of {', '.join(HARDWARE)}; got {name!r}.")
    notes, traffic = [], None
    try:
        traffic = count_traffic(fn, args, **static)
    except TrafficUnknown as error:
        notes.append(str(error))
    shapes = _shapes(args)
    program = functools.partial(fn, **static)
    around = without_kernels(program, shapes)
    with tempfile.TemporaryDirectory(prefix="pallas-hub-aot-") as folder:
        jobs = _jobs(Path(folder, "program"), program, shapes, targets, options, label, "bundles")
        if around is not None:
            jobs += _jobs(Path(folder, "around"), around, shapes, targets, options, label, "profile")
        results = run_jobs(jobs, timeout_s=timeout_s, cache=cache)
    arounds = results[len(targets) :] or [{"status": "compiled", "xla": []}] * len(targets)
    reports = [
        build_report(job, result, xla, traffic, least_bytes=least_bytes, flops=flops, notes=notes)
        for job, result, xla in zip(jobs[: len(targets)], results, arounds, strict=False)
    ]
    return reports[0] if isinstance(target, str) else reports


def _jobs(
    path: Path,
    fn: Callable,
    shapes: Sequence[Any],
    targets: Sequence[str],
    options: Any,
    label: str,
    dump: str,
) -> list[Job]:
    path.write_bytes(export_program(fn, shapes, {}))
    return [Job(target, {"exported": str(path)}, options or {}, label, dump) for target in targets]


def _shapes(args: Sequence[Any]) -> list[Any]:
    import jax

    return [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arg) for arg in args]


def build_report(
    job: Job,
    result: dict[str, Any],
    around: dict[str, Any],
    traffic: Sequence[Traffic] | None,
    *,
    least_bytes: int | None = None,
    flops: int | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Put the workers' answers (the program, the program around the kernels) and the counted traffic together."""
    hardware = HARDWARE[job.target]
    operations = around.get("xla")
    if operations is None:
        notes = [*notes, f"no estimate of the XLA operations: {around.get('reason', around['status'])}"]
    return Report(
        label=job.label,
        target=job.target,
        status=result["status"],
        reason=result.get("reason", ""),
        compile_seconds=result.get("seconds"),
        cached=result.get("cached", False),
        kernels=tuple(_match(result.get("kernels", []), list(traffic or []), hardware)),
        xla_us=None if operations is None else sum(_operation_us(operation, hardware) for operation in operations),
        xla_operations=len(operations or []),
        least_bytes=least_bytes,
        flops=flops,
        hbm_temporary_bytes=result.get("hbm_temporary_bytes"),
        notes=tuple(notes),
    )


def _operation_us(operation: dict[str, Any], hardware: Hardware) -> float:
    return max(hardware.cycles_us(operation["cycles"]), hardware.bandwidth_us(operation["hbm_bytes"]))


def _match(codes: list[dict[str, Any]], traffic: list[Traffic], hardware: Hardware) -> list[KernelReport]:
    """Pair what was compiled with what was counted. The compiler compiles equal kernels once, so names decide."""
    by_name = {code["name"]: code for code in codes}
    if not traffic:
        return [_kernel_report(code, None, hardware) for code in codes]
    reports = []
    for index, counted in enumerate(traffic):
        code = by_name.get(counted.kernel) or (codes[index] if index < len(codes) else None)
        if code is not None:
            reports.append(_kernel_report(code, counted, hardware))
    return reports


def _kernel_report(code: dict[str, Any], counted: Traffic | None, hardware: Hardware) -> KernelReport:
    step = max(code["body"]["inner"], key=lambda loop: _total(loop, "bundles"), default=code["body"])
    bundles = _total(step, "bundles")
    slots = bundles * step["matmul_capacity"]
    nbytes, fill, time_us = None, 0, None
    if counted is not None and counted.counted:
        nbytes, fill = counted.bytes, _fill_bytes(counted)
        busy = max(hardware.bandwidth_us(nbytes), hardware.cycles_us(counted.steps * bundles))
        time_us = busy + hardware.bandwidth_us(fill)
    return KernelReport(
        name=code["name"],
        vmem_bytes=code["vmem_bytes"],
        step_bundles=bundles,
        matmul_share=_total(step, "matmul") / slots if slots else 0.0,
        spills=_total(step, "spills"),
        fills=_total(step, "fills"),
        steps=counted.steps if counted else None,
        bytes=nbytes,
        fill_bytes=fill,
        time_us=time_us,
    )


def _total(loop: dict[str, Any], what: str) -> int:
    return loop[what] + sum(_total(inner, what) for inner in loop["inner"])


def _fill_bytes(counted: Traffic) -> int:
    """Bytes of one block of every operand: what is copied before the first step and after the last."""
    return sum(operand.bytes // max(operand.copies, 1) for operand in (*counted.inputs, *counted.outputs))
