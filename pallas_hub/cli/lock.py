"""`pallas-hub lock`: pin kernels to commits, in the lock file format of the `kernels` library."""

import argparse
import json
from pathlib import Path

from pallas_hub.registry.errors import LockError
from pallas_hub.registry.lock import lock, project_dependencies


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "lock",
        help="pin kernels to commits in kernels.lock",
        description=(
            "Write the commit that each kernel version is now, for get_kernel(..., lockfile=...) and the "
            "kernels library. Without names, [tool.kernels.dependencies] of ./pyproject.toml is locked."
        ),
        epilog="example: pallas-hub lock pallas-hub/ragged-dot@1 pallas-hub/rms-norm@1 --output kernels.lock",
    )
    parser.add_argument("kernels", metavar="ORG/NAME@VERSION", nargs="*")
    parser.add_argument(
        "--project", metavar="DIR", type=Path, default=Path(), help="folder of pyproject.toml (default: .)"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="lock file to write (default: DIR/kernels.lock)")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    wanted = _parse(args.kernels) if args.kernels else project_dependencies(args.project)
    output = args.output or args.project / "kernels.lock"
    found = lock(wanted, output)
    if args.json:
        print(json.dumps({"lockfile": str(output), "locks": found}, indent=2))
    else:
        for kernel, commit in sorted(found.items()):
            print(f"{kernel}  {commit}")
        print(f"written to {output}")
    return 0


def _parse(texts: list[str]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for text in texts:
        repo_id, _, version = text.partition("@")
        if not version.removeprefix("v").isdecimal():
            raise LockError(f"name kernels as org/name@version, as in pallas-hub/ragged-dot@1; got {text!r}.")
        number = int(version.removeprefix("v"))
        if wanted.setdefault(repo_id, number) != number:
            raise LockError(f"{repo_id}: one version per kernel; got {wanted[repo_id]} and {number}.")
    return wanted
