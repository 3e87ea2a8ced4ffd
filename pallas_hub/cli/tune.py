"""`pallas-hub tune`: choose a kernel's block sizes with the real TPU compiler, without a TPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pallas_hub.cli.aot import _names, _positive, _progress, _seconds, add_shape, kernel_name

_EPILOG = """\
examples:
  pallas-hub tune ragged-dot --target v6e --workload qwen3-30b-a3b-gate-up --op forward
  pallas-hub tune rms-norm --target tpu7x --limit 6 --out tuning.json

Each candidate is compiled and modelled as by `pallas-hub aot`; nothing is measured, and a candidate replaces the
default only when the model says it is at least 1 % faster. Interrupted, it goes on where it was. The kernel reads the
file that lies in its tuning/ folder: for the tuned shapes, and for others that differ by at most a factor of 2 in each
size.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="choose block sizes with the TPU compiler, without a TPU",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernel", metavar="KERNEL", type=kernel_name, help="rms-norm or ragged-dot")
    parser.add_argument("--target", required=True, metavar="T", help="one of v5e, v5p, v6e, tpu7x")
    parser.add_argument(
        "--workload", action="extend", type=_names, default=[], metavar="NAME", help="cases whose name contains this"
    )
    add_shape(parser)
    parser.add_argument(
        "--op", action="extend", type=_names, default=[], metavar="OP", help="only these ops, e.g. forward"
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="candidates per workload, beside its default; default: all"
    )
    parser.add_argument("--workers", type=_positive, metavar="N", help="processes at once; default: one per core")
    parser.add_argument("--timeout", type=_seconds, default=180.0, metavar="S", help="seconds per candidate")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: tuning/tpu_<target>.json in the kernel's folder"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pallas_hub.bench.aot import tuning
    from pallas_hub.bench.aot.files import check_writable
    from pallas_hub.bench.aot.hardware import HARDWARE
    from pallas_hub.bench.aot.kernels import choose_workloads
    from pallas_hub.bench.kernel_source import kernel_folder

    def show(tuned: tuning.Tuned) -> None:
        what = f"{tuned.workload.case} {tuned.workload.op}"
        times = f"{_us(tuned.modelled_us)} (default {_us(tuned.default_us)}, gain {tuned.gain:.1%})"
        tried = f"the default and {tuned.tried - 1} others tried"
        print(f"{what}: {tuned.use} modelled {times}, {tried}, {len(tuned.failed)} failed", flush=True)
        for line in tuned.failed:
            print(f"  failed {line}", file=sys.stderr)
        # Written as each workload ends, so that stopping loses nothing.
        tuning.write(args.kernel, args.target, [tuned], path)

    try:
        workloads = choose_workloads(args.kernel, args.workload, args.op, args.shape)
        path = args.out or kernel_folder(args.kernel) / "tuning" / f"tpu_{args.target}.json"
        check_writable(path, "--out")
        if args.target in HARDWARE:
            tuning.read(
                args.kernel, args.target, path
            )  # what it can't be merged into is told before minutes of compiling
        tuning.tune(
            args.kernel,
            workloads,
            args.target,
            limit=args.limit,
            on_workload=show,
            workers=args.workers,
            timeout_s=args.timeout,
            on_done=_progress,
        )
    except (ValueError, ImportError, OSError) as error:
        print(f"pallas-hub tune: {error}", file=sys.stderr)
        return 1
    print(f"written to {path}" if path.is_file() else "the defaults are best: there is nothing to write")
    return 0


def _us(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} us"
