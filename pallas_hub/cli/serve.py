"""`pallas-hub serve`: a Hub on loopback that huggingface_hub and kernels accept through HF_ENDPOINT."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_DESCRIPTION = """\
Serve kernel repos from a directory, in the Hugging Face Hub's own protocol: huggingface_hub, kernels and git
work with it once HF_ENDPOINT points to it. It is for tests, air-gapped clusters and development: it has no
users, no private repos and no TLS.
"""
_EXAMPLE = """\
example:
  pallas-hub serve --store ~/kernel-store --trust pallas-hub
  export HF_ENDPOINT=http://127.0.0.1:8787        # in the shell of the client
  pallas-hub publish rms-norm --org pallas-hub
  git clone --branch v1 http://127.0.0.1:8787/kernels/pallas-hub/rms-norm   # main holds the card alone
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="serve kernel repos on loopback, in the Hub's protocol",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--store", type=Path, required=True, metavar="DIR", help="directory of the repos; made if absent"
    )
    parser.add_argument("--port", type=int, default=8787, help="port (default 8787); 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="ORG",
        help="announce ORG as a trusted kernel publisher, so that clients load its kernels without "
        "trust_remote_code; repeat for several",
    )
    parser.add_argument(
        "--token",
        default=os.environ.get("PALLAS_HUB_SERVE_TOKEN"),
        help="bearer token that writes must carry (default: the variable PALLAS_HUB_SERVE_TOKEN; unset: "
        "anybody may write)",
    )
    parser.add_argument(
        "--max-commit-mb",
        type=int,
        default=256,
        metavar="MB",
        help="limit for one commit request (default 256 MiB)",
    )
    parser.add_argument("--verbose", action="store_true", help="log every request")
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; 0 after a clean stop, 1 with one line on stderr if it cannot start."""
    try:
        from pallas_hub.registry.server.run import Hub, ServeError, is_loopback, serve
        from pallas_hub.registry.server.store import StoreError
    except ModuleNotFoundError as error:
        print(
            f"pallas-hub serve: the package {error.name} is missing. Install what the server needs: "
            "pip install 'pallas-hub[serve]'",
            file=sys.stderr,
        )
        return 1

    if args.max_commit_mb < 1:
        print(
            f"pallas-hub serve: --max-commit-mb must be at least 1; got {args.max_commit_mb}.",
            file=sys.stderr,
        )
        return 1

    def announce(hub: Hub) -> None:
        if not is_loopback(args.host):
            who = "anybody who has the token" if args.token else "anybody"
            print(
                f"warning: {args.host} can be reached from other machines, without encryption; {who} may "
                "publish code there. For tests, air-gapped clusters and development only.",
                file=sys.stderr,
            )
        trusted = ", ".join(args.trust) or "none (add one with --trust ORG)"
        print(f"serving {hub.url} (store {hub.store})")
        writes = "with the token" if args.token else "by anybody: there is no authentication"
        print(f"  for the clients    export HF_ENDPOINT={hub.url}")
        print(f"  trusted publishers {trusted}")
        print(f"  writes             {writes}")
        print("  for tests, air-gapped clusters and development; stop with Ctrl-C", flush=True)

    try:
        serve(
            args.store,
            host=args.host,
            port=args.port,
            trusted=args.trust,
            token=args.token or None,
            max_commit_bytes=args.max_commit_mb * 2**20,
            verbose=args.verbose,
            on_ready=announce,
        )
    except (ServeError, StoreError) as error:
        print(f"pallas-hub serve: {error}", file=sys.stderr)
        return 1
    print("stopped")
    return 0
