"""`pallas-hub download`: fetch a kernel for offline use."""

import argparse
import json

from pallas_hub.registry.verify import download, verify


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "download",
        help="fetch a kernel into the Hub cache, for offline use",
        description="Fetch all variants of a kernel and verify them. Afterwards HF_HUB_OFFLINE=1 works.",
        epilog="example: pallas-hub download pallas-hub/ragged-dot --version 1",
    )
    parser.add_argument("repo_id", metavar="ORG/NAME")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, help="version to fetch (default: the newest)")
    which.add_argument("--revision", help="branch, tag or commit to fetch")
    parser.add_argument("--force", action="store_true", help="fetch again what is there, to replace damaged files")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    folder = download(args.repo_id, version=args.version, revision=args.revision, force=args.force)
    reports = verify(folder)
    variants = [report.variant for report in reports]
    if args.json:
        print(json.dumps({"repo_id": args.repo_id, "path": str(folder), "variants": variants}, indent=2))
    else:
        print(f"{args.repo_id}: {', '.join(variants)} verified in {folder}")
    return 0
