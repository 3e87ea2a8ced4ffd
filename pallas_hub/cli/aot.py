"""`pallas-hub aot`: compile a kernel for real TPUs, without a TPU, and report what the compiler made of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_LONGEST_S = 86_400  # of one program

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
    parser.add_argument(
        "what",
        metavar="KERNEL",
        type=kernel_name,
        help="rms-norm, ragged-dot, moe-experts, router, flash-attention, paged-attention, or path/to/file.py:function",
    )
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
        "--vs",
        action="extend",
        type=_names,
        default=[],
        metavar="WHO",
        help="peers, by kernel: docs/aot.md; a wrong name lists those there are",
    )
    parser.add_argument("--arg", action="append", default=[], metavar="SPEC", help="bf16[512,2048], or a .npy file")
    parser.add_argument("--workers", type=_positive, metavar="N", help="processes at once; default: one per core")
    parser.add_argument(
        "--timeout", type=_seconds, default=180.0, metavar="S", help="seconds per program (default: 180)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON; - prints it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables as a page; - prints it")
    baseline = parser.add_mutually_exclusive_group()
    baseline.add_argument("--check", action="store_true", help="compare with the committed baseline; 1 when worse")
    baseline.add_argument("--update", action="store_true", help="record these numbers as the baseline")
    parser.set_defaults(run=run)


def add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="m=M,...",
        help="sizes of your own, in the kernel's letters: m=4096,n=5120 (and residual, float32, ...) for rms-norm, "
        "m=512,k=2048,n=1536,g=128 for ragged-dot, t=64,h=2048,i=768,e=128,k=8 (and int8, fp8, int4, ...) for "
        "moe-experts; rows go to groups and tokens to experts at random (seed 0); repeatable",
    )


def kernel_name(text: str) -> str:
    """rms_norm and pallas-hub/rms-norm@1 are rms-norm as well; a file's function stays as it is."""
    if ":" in text or text.endswith(".py"):
        return text
    return text.rpartition("/")[2].partition("@")[0].replace("_", "-")


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"takes names with commas between them; got {text!r}")
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most {_LONGEST_S} seconds; got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    try:
        _check_outputs(args)
        args.target = list(dict.fromkeys(args.target or ()))
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
        _write(args.html, table.as_html(rows))
    if args.json:
        _write(args.json, json.dumps(table.as_json(rows), indent=2))
    if not _is_printed(args.json) and not _is_printed(args.html):
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
    for text in args.arg:  # mistakes in an argument or the name are told before anything is compiled
        parse_argument(text)
    import jax  # noqa: F401  (before the file's folder is looked in: a jax.py there is not JAX)

    _import(find_function, args.what)
    jobs = [Job(target, {"function": args.what, "args": args.arg, "static": {}}, {}, args.what) for target in targets]
    results = run_jobs(jobs, workers=args.workers, timeout_s=args.timeout)
    reports = [build_report(job, result) for job, result in zip(jobs, results, strict=True)]
    if args.json:
        _write(args.json, json.dumps([report.as_numbers() for report in reports], indent=2))
    if not _is_printed(args.json):
        print(table.report_text(reports))
    return 0 if all(report.status in ("compiled", "no estimate") for report in reports) else 1


def _run_baseline(args: argparse.Namespace) -> int:
    from pallas_hub.bench.aot import baseline
    from pallas_hub.bench.aot.hardware import HARDWARE

    if args.shape:
        raise ValueError("--check and --update go with --workload: a baseline holds the kernel's own workloads.")
    if args.vs or args.json or args.html:
        raise ValueError("--vs, --json and --html do not go with --check and --update, which compare numbers only.")
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


def _import(find_function: Callable[[str], Any], name: str) -> None:
    """Look the function up in its file, whatever that does when it is imported.

    Raises   ValueError, ImportError: no such file or function, or the import failed.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the report's
            find_function(name)
    except (ValueError, ImportError):
        raise
    except (Exception, SystemExit) as error:
        said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        raise ValueError(f"{name!r}: importing it failed: {said}") from error


def _check_outputs(args: argparse.Namespace) -> None:
    from pallas_hub.bench.aot.files import check_writable

    for name in ("json", "html"):
        if (path := getattr(args, name)) and not _is_printed(path):
            check_writable(path, f"--{name}")
    if _is_printed(args.json) and _is_printed(args.html):
        raise ValueError("--json - and --html - would print both to one place; name a file for one of them.")


def _is_printed(path: Path | None) -> bool:
    return str(path) == "-"


def _write(path: Path, text: str) -> None:
    from pallas_hub.bench.aot.files import replace_text

    if _is_printed(path):
        print(text)
    else:
        replace_text(path, text + "\n")
