"""`pallas-hub bench`: measure a kernel next to what a user would pick instead, after checking all of them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

_WORKLOADS = {"moe-experts": "moe_experts", "ragged-dot": "ragged_dot", "rms-norm": "rms_norm"}
_EPILOG = """\
examples:
  pallas-hub bench ragged-dot --tokens 1 8 64 --dtype bfloat16
  pallas-hub bench rms-norm --cold --json
  pallas-hub bench ragged-dot --workload small --seconds 2 --plot bench.png
  pallas-hub bench bridge
  pallas-hub bench decode --batch 1 8 64
  pallas-hub bench decode --workload gemma4-26b-a4b --layers 2 --dtype float32

Every implementation is compared with a float64 result first. One that is wrong is reported, not timed, and the exit
code is 1. `x best other` is the speed against the fastest of all other rows; `of stream` is the bandwidth achieved
on the least possible bytes, as a share of a plain streaming run over the same buffers in the same rounds.

`decode` takes a model with the layers of a real one, fewer of them, and decodes with Transformers' implementations of
the experts and with kernelize, a step of each in turn, on the same tokens; their logits are compared.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a kernel against its rivals, after checking all of them",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        choices=[*_WORKLOADS, "bridge", "decode"],
        help="a kernel, the cost of the torch-JAX bridge, or decoding with a whole model",
    )
    parser.add_argument("--workload", metavar="NAME", help="a named model size (an unknown name lists them)")
    parser.add_argument(
        "--dtype", nargs="+", choices=["bfloat16", "float32", "float16"], help="default: bfloat16 float32"
    )
    parser.add_argument("--tokens", nargs="+", type=_positive, metavar="N", help="rows to process; default: per kernel")
    parser.add_argument("--seconds", type=float, default=5.0, help="time budget of each table's rounds (default: 5)")
    parser.add_argument("--cold", action="store_true", help="empty the CPU caches before every sample")
    parser.add_argument("--repo", metavar="ORG/NAME", help="measure this kernel repo (default: pallas-hub/<kernel>)")
    parser.add_argument("--source", action="store_true", help="measure the source folder of this checkout as it is")
    parser.add_argument("--all", action="store_true", help="also the rivals that take seconds per call")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="save a bar chart (needs matplotlib)")
    whole = parser.add_argument_group("decode only")
    whole.add_argument("--batch", nargs="+", type=_positive, default=[1, 8, 64], metavar="N", help="default: 1 8 64")
    whole.add_argument("--layers", type=_positive, default=4, metavar="N", help="layers of the model (default: 4)")
    whole.add_argument("--prompt", type=_positive, default=16, metavar="N", help="tokens before (default: 16)")
    whole.add_argument("--new-tokens", type=_positive, default=16, metavar="N", help="steps to time (default: 16)")
    whole.add_argument("--device", default="cpu", metavar="NAME", help="where the model runs (default: cpu)")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    if args.what == "bridge":
        return _run_bridge(args)
    if args.what == "decode":
        return _run_decode(args)
    from pallas_hub.bench import machine, plots, report
    from pallas_hub.bench.loading import load_kernel, record_paths_of
    from pallas_hub.bench.runner import run_case

    module = importlib.import_module(f"pallas_hub.bench.workloads.{_WORKLOADS[args.what]}")
    workload = args.workload or module.DEFAULT_WORKLOAD
    try:
        if args.plot:
            plots.require_matplotlib()
        about = machine.describe_machine()
        kernel, about["kernel"] = load_kernel(args.what, args.repo, args.source)
        names = module.workloads(kernel)
        if workload not in names:
            raise ValueError(f"--workload must be one of {', '.join(names)}; got {workload!r}.")
        results = []
        if not args.json:
            print("\n".join(report.header_lines(about)), flush=True)
        dtypes, tokens = args.dtype or module.DTYPES, args.tokens or module.TOKENS
        for case in module.cases(kernel, workload, dtypes, tokens, args.all):
            _progress(f"{case.title} ...")
            record = record_paths_of(kernel)
            results.append(run_case(case, seconds=args.seconds, cold=args.cold, record_paths=record))
            if not args.json:  # each table as soon as it is there: the rivals of a large case take minutes
                print("\n".join(["", *report.case_lines(results[-1])]), flush=True)
        if args.plot:
            plots.save_plot(about, results, args.plot)
    except Exception as error:  # one line that names the cause
        return _fail(error)
    if args.json:
        print(json.dumps(report.to_json(about, results), indent=2))
    if args.plot:
        _progress(f"chart saved to {args.plot}")
    return 1 if any(result.failed for result in results) else 0


def _run_bridge(args: argparse.Namespace) -> int:
    from pallas_hub.bench import bridge_overhead, machine, report

    about = machine.describe_machine()
    try:
        rows = bridge_overhead.measure(dtypes=tuple(args.dtype or ("float32", "bfloat16")))
    except Exception as error:
        return _fail(error)
    lines = [asdict(row) for row in rows]
    if args.json:
        print(json.dumps({"machine": about, "rows": lines}, indent=2))
    else:
        print(report.bridge_text(about, lines))
    return 0


def _run_decode(args: argparse.Namespace) -> int:
    from pallas_hub.bench import decode_run

    dtypes = args.dtype or ["bfloat16"]
    try:
        if args.tokens or args.cold or args.plot or len(dtypes) > 1:
            raise ValueError("decode takes --batch, not --tokens, one --dtype, and neither --cold nor --plot.")
        options = decode_run.Options(
            workload=args.workload,
            dtype=dtypes[0],
            layers=args.layers,
            batch=tuple(args.batch),
            prompt=args.prompt,
            new_tokens=args.new_tokens,
            device=args.device,
            repo=args.repo,
            source=args.source,
            everything=args.all,
            json=args.json,
        )
        return decode_run.run(options)
    except Exception as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    print(f"pallas-hub bench: {error or type(error).__name__}", file=sys.stderr)
    return 1


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
