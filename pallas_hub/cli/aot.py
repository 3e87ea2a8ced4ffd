"""`pallas-hub aot`: compile a kernel for real TPUs, without a TPU, and report what the compiler made of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EPILOG = """\
examples:
  pallas-hub aot rms-norm --target v6e --workload llama-3-8b-4096
  pallas-hub aot ragged-dot --workload qwen3 --op forward --vs jax,tokamax,xla --html report.html
  pallas-hub aot rms-norm --shape m=4096,n=5120 --target v6e
  pallas-hub aot ragged-dot --shape m=512,k=2048,n=1536,g=128 --op forward --vs jax
  pallas-hub aot my_kernel.py:matmul --arg 'bf16[512,2048]' --arg 'bf16[2048,512]'
  pallas-hub aot rms-norm --check

Columns are headed compiled (libtpu's compiler said so), counted (from grid and index maps, for sampled routing) or
modelled: max(bytes / HBM bandwidth, steps x bundles / clock) + fill. `(n?)` behind the bundles of a step: so many of
them a branch may skip. `XLA around`: the operations before and after the kernel. Needs libtpu, no TPU.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "aot",
        help="compile a kernel for real TPUs, without a TPU, and report",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="KERNEL", help="rms-norm, ragged-dot, or path/to/file.py:function")
    parser.add_argument(
        "--target", action="extend", type=_names, metavar="T,T", help="of v5e, v5p, v6e, tpu7x; default: all"
    )
    parser.add_argument(
        "--workload", action="extend", type=_names, default=[], metavar="NAME", help="cases whose name contains this"
    )
    add_shape(parser)
    parser.add_argument(
        "--op", action="extend", type=_names, default=[], metavar="OP", help="only these ops, e.g. forward"
    )
    parser.add_argument(
        "--vs", action="extend", type=_names, default=[], metavar="WHO", help="peers: jax, tokamax, xla, ..."
    )
    parser.add_argument("--arg", action="append", default=[], metavar="SPEC", help="bf16[512,2048], or a .npy file")
    parser.add_argument("--workers", type=_positive, metavar="N", help="processes at once; default: one per core")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds per program (default: 180)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON; - prints it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables as a page")
    parser.add_argument("--check", action="store_true", help="compare with the committed baseline; 1 when worse")
    parser.add_argument("--update", action="store_true", help="record these numbers as the baseline")
    parser.set_defaults(run=run)


def add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="m=M,...",
        help="sizes of your own, in the kernel's letters: m=4096,n=5120 (and residual, float32, ...) for rms-norm, "
        "m=512,k=2048,n=1536,g=128 for ragged-dot, whose rows then go to groups at random (seed 0); repeatable",
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    try:
        if ":" in args.what:
            return _run_function(args)
        if args.arg:
            raise ValueError(
                "--arg goes with path/to/file.py:function; a kernel's arguments come from --workload or --shape."
            )
        return _run_baseline(args) if args.check or args.update else _run_kernel(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"pallas-hub aot: {error}", file=sys.stderr)
        return 1


def _run_kernel(args: argparse.Namespace) -> int:
    from pallas_hub.bench.aot import kernels, table
    from pallas_hub.bench.aot.hardware import HARDWARE

    workloads = kernels.choose_workloads(args.what, args.workload, args.op, args.shape)
    rows = kernels.report_kernel(
        args.what,
        workloads,
        args.target or list(HARDWARE),
        versus=args.vs,
        workers=args.workers,
        timeout_s=args.timeout,
        on_done=_progress,
    )
    if args.html:
        args.html.write_text(table.as_html(rows))
    if args.json:
        _write_json(args.json, table.as_json(rows))
    if str(args.json) != "-":
        print(table.text(rows))
    return 0 if all(row.report.status in ("compiled", "no estimate") for row in rows if row.impl == "ours") else 1


def _run_function(args: argparse.Namespace) -> int:
    from pallas_hub.bench.aot import table
    from pallas_hub.bench.aot.hardware import HARDWARE
    from pallas_hub.bench.aot.program import find_function, parse_argument
    from pallas_hub.bench.aot.report import build_report, check_targets
    from pallas_hub.bench.aot.runner import Job, require_libtpu, run_jobs

    if args.workload or args.shape or args.op or args.vs or args.check or args.update:
        raise ValueError("--workload, --shape, --op, --vs, --check and --update go with a kernel of this project.")
    if args.html:
        raise ValueError("--html goes with a kernel of this project; use --json.")
    require_libtpu()
    targets = args.target or list(HARDWARE)
    check_targets(targets)
    find_function(args.what)  # mistakes in the name or in an argument are told before anything is compiled
    for text in args.arg:
        parse_argument(text)
    jobs = [Job(target, {"function": args.what, "args": args.arg, "static": {}}, {}, args.what) for target in targets]
    results = run_jobs(jobs, workers=args.workers, timeout_s=args.timeout)
    reports = [build_report(job, result) for job, result in zip(jobs, results, strict=True)]
    if args.json:
        _write_json(args.json, [report.as_numbers() for report in reports])
    if str(args.json) != "-":
        print(table.report_text(reports))
    return 0 if all(report.status in ("compiled", "no estimate") for report in reports) else 1


def _run_baseline(args: argparse.Namespace) -> int:
    from pallas_hub.bench.aot import baseline
    from pallas_hub.bench.aot.hardware import HARDWARE

    if args.shape:
        raise ValueError("--check and --update go with --workload: a baseline holds the kernel's own workloads.")
    targets: Sequence[str] = args.target or list(HARDWARE)
    options: dict[str, Any] = {"workers": args.workers, "timeout_s": args.timeout, "on_done": _progress}
    if args.update:
        path = baseline.update(args.what, targets, args.workload, args.op, **options)
        print(f"recorded in {path}")
        return 0
    result = baseline.check(args.what, targets, args.workload, args.op, **options)
    print(result.text())
    return 1 if result.worse else 0


def _progress(line: str, done: int, total: int) -> None:
    print(f"[{done}/{total}] {line}", file=sys.stderr, flush=True)


def _write_json(path: Path, data: Any) -> None:
    text = json.dumps(data, indent=2)
    if str(path) == "-":
        print(text)
    else:
        path.write_text(text + "\n")
