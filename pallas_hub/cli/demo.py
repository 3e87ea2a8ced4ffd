"""`pallas-hub demo`: the main job end to end on this machine, each step checked."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_hub.demo import Step

# Of the extras serve, aot and transformers. Without libtpu the last step alone is skipped.
_NEEDS = ("starlette", "uvicorn", "dulwich", "jax", "transformers")
_EPILOG = """\
examples:
  pallas-hub demo
  pallas-hub demo --tokens 1 8 --json > demo.json

Starts a Hub on loopback, publishes both kernels to it, loads them back, checks them, swaps them into a Qwen3-MoE
model, times one layer at real size and compiles the Pallas kernels for TPUs. Nothing leaves the machine and nothing
is left on it. Takes about two minutes on two cores and 4 GB of memory. The exit code is 1 when a check fails.
`make demo` installs what it needs.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="the main job end to end: publish, load, check, swap into a model, time, compile for TPUs",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", default="qwen3-30b-a3b", metavar="NAME", help="what to time; `small` is quick")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64], metavar="N", help="sizes to time")
    parser.add_argument("--seconds", type=float, default=2.0, help="time budget of each table's rounds (default: 2)")
    parser.add_argument(
        "--json", action="store_true", help="print the facts of every step as JSON; the story to stderr"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"pallas-hub demo: not installed: {', '.join(missing)}. Run `make demo` in a checkout, or install what the "
            "demo needs: pip install 'pallas-hub[serve,aot,transformers]'",
            file=sys.stderr,
        )
        return 1
    from pallas_hub import demo

    def say(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    try:
        steps = demo.run(say, workload=args.workload, tokens=tuple(args.tokens), seconds=args.seconds)
    except RuntimeError as error:
        print(f"pallas-hub demo: {error}", file=sys.stderr)
        return 1
    passed = all(step.passed for step in steps)
    if args.json:
        print(json.dumps({"passed": passed, "steps": [asdict(step) for step in steps]}, indent=2))
    else:
        print(_summary(steps, passed))
    return 0 if passed else 1


def _summary(steps: list[Step], passed: bool) -> str:
    lines = ["summary"]
    for step in steps:
        lines.append(f"  {'ok    ' if step.passed else 'FAILED'} {step.seconds:6.1f} s  {step.title}")
        lines += [f"{'':20}{part}" for part in step.headline.split("; ") if part]
    total = sum(step.seconds for step in steps)
    return "\n".join([*lines, f"  {'all steps passed' if passed else 'stopped at the failed step'}, {total:.0f} s"])
