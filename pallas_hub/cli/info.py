"""`pallas-hub info`: what a kernel offers, and which of its builds fits this machine."""

import argparse
import json

from pallas_hub.registry.describe import Description, describe


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "info",
        help="show the versions, API and builds of a kernel",
        description="Show what is recorded about a kernel of this package and what the Hub holds. Runs none "
        "of its code.",
        epilog="example: pallas-hub info pallas-hub/ragged-dot",
    )
    parser.add_argument(
        "kernel", metavar="NAME|ORG/NAME", help="a kernel of this package, or any kernel repo on the Hub"
    )
    parser.add_argument("--version", type=int, help="version whose builds are listed (default: the newest)")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    found = describe(args.kernel, version=args.version)
    print(json.dumps(found.to_json(), indent=2) if args.json else _text(found))
    return 0


def _text(found: Description) -> str:
    lines = [f"{found.repo_id}  {found.description}".rstrip()]
    for number, version in sorted(found.recorded.items()):
        lines.append(f"v{number}: {', '.join(version.variants)}; {', '.join(version.dtypes) or 'dtypes not recorded'}")
        lines += [f"  {name}{text if text.startswith('(') else ' ' + text}" for name, text in version.api.names.items()]
        lines += [f"  layer {name}.forward{facts['forward']}" for name, facts in version.api.layers.items()]
    if found.hub_error:
        lines.append(f"Hub: {found.hub_error}")
    else:
        held = ", ".join(f"v{number} ({commit[:12]})" for number, commit in found.hub_versions.items()) or "no versions"
        lines.append(f"{'In' if found.endpoint == 'the cache' else 'On'} {found.endpoint}: {held}")
        lines += [f"  {variant:<12} {verdict}" for variant, verdict in found.variants.items()]
    return "\n".join(lines)
