"""`pallas-hub publish`: push a kernel's build to the Hub."""

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable

from pallas_hub.registry.publish import Published, publish


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "publish",
        help="push a kernel to the Hub as version v<N>",
        description="Build kernels/NAME and push it to branch v<N> of its repo. Doing it again changes nothing.",
        epilog="example: pallas-hub publish ragged-dot --org pallas-hub --dry-run",
    )
    parser.add_argument("name", metavar="NAME", help="kernel to publish")
    parser.add_argument("--org", help="organisation or user to publish under (default: the one in build.toml)")
    parser.add_argument("--endpoint", metavar="URL", help="Hub to publish to (default: HF_ENDPOINT or huggingface.co)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be pushed, push nothing")
    parser.add_argument("--private", action="store_true", help="make the repo private, if it is created now")
    parser.add_argument(
        "--release",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="freeze the digests in hub_manifests/ (default: yes, unless the Hub is on loopback)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    done = publish(
        args.name,
        args.org,
        endpoint=args.endpoint,
        dry_run=args.dry_run,
        private=args.private,
        release=args.release,
    )
    print(json.dumps(dataclasses.asdict(done), indent=2) if args.json else _text(done))
    return 0


def _text(done: Published) -> str:
    where = f"{done.repo_id} {done.branch} on {done.endpoint}"
    if done.up_to_date:
        return f"{where} is up to date; nothing to push."
    lines = [f"would push to {where}:" if done.dry_run else f"pushed to {where}:"]
    for mark, paths in (("+", done.added), ("~", done.changed), ("-", done.deleted)):
        lines += [f"  {mark} {path}" for path in _folded(paths)]
    lines += [f"  ~ {path} (on main)" for path in done.main_changed]
    if done.not_compared:
        lines.append(f"every file is listed, since it is not known what is there: {done.not_compared}")
    if done.commit:
        lines.append(f"commit {done.commit}")
    if done.released:
        lines.append("hub_manifests: the build is marked as released; commit that change.")
    return "\n".join(lines)


def _folded(paths: Iterable[str]) -> list[str]:
    """One line per build variant with more than five files, in the place of its first file. `--json` names them all."""
    folders = {path: "/".join(path.split("/")[:2]) + "/" if path.startswith("build/") else path for path in paths}
    count = Counter(folders.values())
    lines = {f"{to} ({count[to]} files)" if count[to] > 5 else path: None for path, to in folders.items()}
    return list(lines)
