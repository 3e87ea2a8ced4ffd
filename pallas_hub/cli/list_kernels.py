"""`pallas-hub list`: the kernels that this package publishes."""

import argparse
import json

from pallas_hub.registry.load import list_kernels


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "list",
        help="list the kernels of this package",
        description="List the kernels of this package, from hub_manifests/. No network.",
        epilog="example: pallas-hub list --json",
    )
    parser.add_argument("--json", action="store_true", help="one JSON list, for machines")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    kernels = list_kernels()
    if args.json:
        rows = [
            {
                "name": kernel.name,
                "repo_id": kernel.repo_id,
                "versions": sorted(kernel.versions),
                "license": kernel.license,
                "description": kernel.description,
            }
            for kernel in kernels
        ]
        print(json.dumps(rows, indent=2))
        return 0
    width = max((len(kernel.repo_id) for kernel in kernels), default=0)
    for kernel in kernels:
        versions = ", ".join(f"v{number}" for number in sorted(kernel.versions))
        print(f"{kernel.repo_id:<{width}}  {versions}  {kernel.description}".rstrip())
    if not kernels:
        print("No kernels recorded. Add one with: pallas-hub build NAME --record")
    return 0
