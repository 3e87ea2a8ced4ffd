"""One program on one TPU generation: what was compiled, what was counted, what is modelled from the two.

    model time of a kernel = max(bytes / HBM bandwidth, steps of a core * bundles per step / clock) + fill
    fill                   = copying in the first blocks and out the last ones of each core, which nothing overlaps

It is a best case. Where the first term is the larger one, it equals the roofline by construction and is no proof of
speed; it tells good block sizes from bad ones, not good from good. docs/aot.md has its calibration and its limits.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pallas_hub.bench.aot.export import export_program
from pallas_hub.bench.aot.hardware import HARDWARE, Hardware
from pallas_hub.bench.aot.program import shapes_of
from pallas_hub.bench.aot.runner import DEFAULT_TIMEOUT_S, Job, require_libtpu, run_jobs

MIB = 1 << 20


@dataclass(frozen=True)
class KernelReport:
    """One Pallas kernel of a program.

    compiled   vmem_bytes of vmem_limit_bytes; per grid step: step_bundles, of them conditional_bundles that a branch
               may skip, matmul_share of the matrix units' slots, spills, fills
               and cores: how many of the chip share the steps
    counted    steps of all cores, core_steps of the one with the most; bytes, fill_bytes (None where the kernel makes
               its own copies)
    modelled   time_us (None where bytes, steps or a loop's length are unknown)
    """

    name: str
    vmem_bytes: int
    vmem_limit_bytes: int
    step_bundles: int
    conditional_bundles: int
    matmul_share: float
    spills: int
    fills: int
    steps: int | None
    bytes: int | None
    fill_bytes: int | None
    compute_us: float | None
    time_us: float | None
    cores: int = 1
    core_steps: int | None = None


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
    xla_bytes: int | None = None
    least_bytes: int | None = None
    flops: int | None = None
    hbm_temporary_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def hardware(self) -> Hardware:
        return HARDWARE[self.target]

    @property
    def spills(self) -> int:
        return sum(kernel.spills + kernel.fills for kernel in self.kernels)

    @property
    def bytes(self) -> int | None:
        """What the kernels move; of a program without kernels, what its XLA operations move."""
        if not self.kernels:
            return self.xla_bytes
        return _sum(kernel.bytes for kernel in self.kernels)

    @property
    def kernel_us(self) -> float | None:
        """Never less than the matrix units take for the operations at their published peak."""
        total = _sum(kernel.time_us for kernel in self.kernels) if self.kernels else None
        return None if total is None else max(total, self._matrix_us)

    @property
    def _matrix_us(self) -> float:
        return (self.flops or 0) / self.hardware.bf16_tflop_s / 1e6

    @property
    def time_us(self) -> float | None:
        """Kernels and the XLA operations around them, one after the other."""
        if not self.kernels:
            return self.xla_us if self.status == "compiled" else None
        return None if self.kernel_us is None or self.xla_us is None else self.kernel_us + self.xla_us

    @property
    def roofline_us(self) -> float | None:
        """The least time the hardware allows: least bytes through HBM, or the operations through the matrix units."""
        if self.least_bytes is None:
            return None
        return max(self.hardware.bandwidth_us(self.least_bytes), self._matrix_us)

    @property
    def roofline_share(self) -> float | None:
        if self.roofline_us is None or not self.time_us:
            return None
        return self.roofline_us / self.time_us

    def as_numbers(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        derived = ("bytes", "kernel_us", "time_us", "roofline_us", "roofline_share")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def _sum(values: Any) -> Any:
    values = list(values)
    return None if None in values else sum(values)


def _check_call(fn: Callable, args: Sequence[Any], static: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except ValueError:  # of some builtins nobody knows it
        return
    try:
        signature.bind(*args, **static)
    except TypeError as error:
        given = ", ".join([f"{len(args)} arrays", *static])
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"compile_report: {name}{signature} must take what args and options hold; got {given}: {error}."
        ) from None


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
    workers: int | None = None,
    cache: Path | None = None,
    **static: Any,
) -> Any:
    """Compile `fn(*args, **static)` for real TPUs, on a machine without one, and report on it.

    Shapes   args: `jax.ShapeDtypeStruct` (or any array) where shape and dtype are all that counts; numpy arrays where
             the traffic depends on the values, such as group sizes
    Units    least_bytes in bytes, flops in floating-point operations: for the roofline
    Returns  a Report; a list of them, in order, when `target` is a sequence
    Raises   TypeError: `fn` can't be called so.  What tracing `fn` raises.  ValueError: unknown target.
             ImportError: no libtpu or flatbuffers.  What the TPU compiler refuses is in the report.
    """
    from pallas_hub.bench.aot.surroundings import split_at_kernels
    from pallas_hub.bench.aot.traffic import TrafficUnknown, count_traffic

    require_libtpu()
    targets = [target] if isinstance(target, str) else list(target)
    check_targets(targets)
    _check_call(fn, args, static)
    program, shapes = functools.partial(fn, **static), shapes_of(args)
    counted: dict[str, Any] = {}
    try:
        counted["traffic"] = [traffic.as_numbers() for traffic in count_traffic(program, args)]
    except TrafficUnknown as error:
        counted["traffic_reason"] = str(error)
    with tempfile.TemporaryDirectory(prefix="pallas-hub-aot-") as folder:
        pieces = [
            export_program(piece.fn, piece.args, Path(folder, f"piece{i}"))
            for i, piece in enumerate(split_at_kernels(program, shapes))
        ]
        named = {"exported": export_program(program, shapes, Path(folder, "program")), "pieces": pieces}
        jobs = [Job(name, named, options or {}, label) for name in targets]
        results = run_jobs(jobs, timeout_s=timeout_s, workers=workers, cache=cache)
    reports = [
        build_report(job, result | counted, least_bytes=least_bytes, flops=flops)
        for job, result in zip(jobs, results, strict=True)
    ]
    return reports[0] if isinstance(target, str) else reports


def check_targets(targets: Sequence[str]) -> None:
    for name in targets:
        if name not in HARDWARE:
            raise ValueError(f"compile_report: target must be one of {', '.join(HARDWARE)}; got {name!r}.")


def build_report(
    job: Job,
    result: dict[str, Any],
    *,
    least_bytes: int | None = None,
    flops: int | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Put the worker's answer and the counted traffic together."""
    hardware = HARDWARE[job.target]
    operations = result.get("xla")
    notes = [*notes, *(result[key] for key in ("traffic_reason",) if key in result)]
    xla_us = None if operations is None else sum(_operation_us(operation, hardware) for operation in operations)
    xla_bytes = None if operations is None else sum(operation["hbm_bytes"] for operation in operations)
    cost = result.get("cost", {})
    if operations is None and "xla_reason" in result:
        if {"seconds", "flops", "bytes"} <= set(cost) and not result.get("kernels"):
            xla_us, xla_bytes = cost["seconds"] * 1e6, int(cost["bytes"])
            notes.append(
                f"time and bytes by the compiler's own cost analysis ({cost['flops'] / 1e9:.0f} GFLOP), since its "
                f"profiler stops: {result['xla_reason']}"
            )
        else:
            notes.append(f"no estimate of the XLA operations: {result['xla_reason']}")
    return Report(
        label=job.label,
        target=job.target,
        status=result["status"],
        reason=result.get("reason", ""),
        compile_seconds=result.get("seconds"),
        cached=result.get("cached", False),
        kernels=tuple(_match(result.get("kernels", []), result.get("traffic", []), job)),
        xla_us=xla_us,
        xla_operations=len(operations or []),
        xla_bytes=xla_bytes,
        least_bytes=least_bytes,
        flops=flops,
        hbm_temporary_bytes=result.get("hbm_temporary_bytes"),
        notes=tuple(notes),
    )


def _operation_us(operation: dict[str, Any], hardware: Hardware) -> float:
    return max(hardware.cycles_us(operation["cycles"]), hardware.bandwidth_us(operation["hbm_bytes"]))


def _match(codes: list[dict[str, Any]], traffic: list[dict[str, Any]], job: Job) -> list[KernelReport]:
    """Pair what was compiled with what was counted. The compiler compiles equal kernels once, so names decide."""
    by_name = {code["name"]: code for code in codes}
    if not traffic:
        return [_kernel_report(code, {}, job) for code in codes]
    reports = []
    for index, counted in enumerate(traffic):
        code = by_name.get(counted["kernel"]) or (codes[index] if index < len(codes) else None)
        if code is not None:
            reports.append(_kernel_report(code, counted, job))
    return reports


def _kernel_report(code: dict[str, Any], counted: dict[str, Any], job: Job) -> KernelReport:
    hardware = HARDWARE[job.target]
    steps, nbytes, fill = counted.get("steps"), counted.get("bytes"), counted.get("fill_bytes")
    cores, core_steps = _share_steps(code, steps)
    # A core with one step has no grid loop; loops that are there belong to the kernel's body.
    step = code["whole"] if core_steps == 1 or code["step"] is None else code["step"]
    compute_us, time_us = None, None
    if core_steps is not None and not step["unknown_loops"]:
        compute_us = hardware.cycles_us(core_steps * step["bundles"] + step["once"])
        if nbytes is not None and core_steps == 1:  # nothing overlaps: in, compute, out
            time_us = hardware.bandwidth_us(nbytes) + compute_us
        elif nbytes is not None:
            time_us = max(hardware.bandwidth_us(nbytes), compute_us) + hardware.bandwidth_us(cores * (fill or 0))
    option = job.options.get("xla_tpu_scoped_vmem_limit_kib")
    default = int(option) * 1024 if option else hardware.default_scoped_vmem_mib * MIB
    return KernelReport(
        name=code["name"],
        vmem_bytes=code["vmem_bytes"],
        vmem_limit_bytes=counted.get("vmem_limit_bytes") or default,
        step_bundles=step["bundles"],
        conditional_bundles=step["conditional"],
        matmul_share=step["matmul"] / step["matmul_slots"] if step["matmul_slots"] else 0.0,
        spills=step["spills"],
        fills=step["fills"],
        steps=steps,
        bytes=nbytes,
        fill_bytes=fill,
        compute_us=compute_us,
        time_us=time_us,
        cores=cores,
        core_steps=core_steps,
    )


def _share_steps(code: dict[str, Any], steps: int | None) -> tuple[int, int | None]:
    """How many cores share the steps, and the steps of the one with the most; one core unless the code shows both."""
    cores, core_steps = code.get("cores", 1), code.get("core_steps")
    if cores == 1 or steps is None:
        return 1, steps
    if steps == cores:
        return cores, 1
    if core_steps is not None and steps <= cores * core_steps and core_steps < steps:
        return cores, core_steps
    return 1, steps
