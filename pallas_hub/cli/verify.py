"""`pallas-hub verify`: check a kernel's files against its metadata and hub_manifests/."""

import argparse
import json
from pathlib import Path

from pallas_hub.registry.errors import SourceError
from pallas_hub.registry.verify import verify, verify_repo


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "verify",
        help="check the files of a kernel against their digests",
        description="Check every file of a kernel, in a folder or on the Hub. Runs none of its code.",
        epilog="example: pallas-hub verify pallas-hub/ragged-dot --version 1",
    )
    parser.add_argument("target", metavar="PATH|ORG/NAME", help="a folder with builds, or a kernel repo on the Hub")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, help="version on the Hub (default: the newest)")
    which.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--released", action="store_true", help="fail unless every build is listed in hub_manifests/")
    parser.add_argument("--json", action="store_true", help="one JSON list, for machines")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    if Path(args.target).exists():
        reports = verify(args.target)
    else:
        reports = verify_repo(args.target, version=args.version, revision=args.revision)
    if args.json:
        rows = [{**vars(report), "path": str(report.path)} for report in reports]
        print(json.dumps(rows, indent=2))
    else:
        for report in reports:
            listed = "listed in hub_manifests" if report.released else "not listed in hub_manifests"
            print(f"{report.name} v{report.version} {report.variant}: {report.files} files intact, {listed}")
            print(f"  {report.digest}  {report.path}")
    strangers = [report.variant for report in reports if not report.released]
    if args.released and strangers:
        raise SourceError(f"{args.target}: not released builds of this package: {', '.join(strangers)}.")
    return 0
