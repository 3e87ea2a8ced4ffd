"""`pallas-hub build`: build kernels from source, check them, record what they promise."""

import argparse
import json

from pallas_hub.registry.build import build
from pallas_hub.registry.errors import ManifestError, PallasHubError, SourceError
from pallas_hub.registry.paths import OUR_SOURCES
from pallas_hub.registry.record import check_recorded, record
from pallas_hub.registry.source import read_source


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "build",
        help="build a kernel's Hub repo from kernels/NAME",
        description="Build the variants, card and licence of a kernel. The same sources give the same bytes.",
        epilog="example: pallas-hub build ragged-dot --out dist/kernels/ragged-dot",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="kernels to build; none with --check means all")
    parser.add_argument("--out", metavar="DIR", help="folder for the build (default: dist/kernels/NAME)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if hub_manifests/ does not list the public API and the digests of this build",
    )
    mode.add_argument(
        "--record",
        action="store_true",
        help="write the public API and the digests of this build into hub_manifests/NAME.toml",
    )
    parser.add_argument("--json", action="store_true", help="one JSON list, for machines")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    names = args.names or (OUR_SOURCES.names() if args.check else [])
    if not names:
        raise SourceError(f"name a kernel to build. Kernels here: {', '.join(OUR_SOURCES.names()) or 'none'}.")
    if args.out and len(names) > 1:
        raise SourceError(f"--out takes one kernel at a time; got {', '.join(names)}.")
    rows = _check(names) if args.check else [_one(name, args) for name in names]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['name']} v{row['version']}: {row['done']}")
    return 0


def _check(names: list[str]) -> list[dict]:
    """Check every kernel before reporting, so that one run shows everything that has to be mended."""
    rows, faults = [], []
    for name in names:
        try:
            check_recorded(name)
            rows.append({"name": name, "version": read_source(name).version, "done": "as recorded in hub_manifests"})
        except PallasHubError as error:
            faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ManifestError(f"{len(faults)} kernels need attention:\n" + "\n".join(str(fault) for fault in faults))
    return rows


def _one(name: str, args: argparse.Namespace) -> dict:
    if args.record:
        manifest = record(name)
        version = read_source(name).version
        digests = manifest.versions[version].builds[-1].digests
        return {"name": name, "version": version, "done": "recorded in hub_manifests", "digests": digests}
    built = build(name, args.out or f"dist/kernels/{name}")
    return {
        "name": name,
        "version": built.version,
        "done": f"built {', '.join(built.digests)} in {built.path}",
        "path": str(built.path),
        "digests": built.digests,
    }
