"""The command line `pallas-hub`: one module per command, errors in one line, exit code 0 only on success."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

# Command -> module. A module offers add_parser(subparsers) and run(args) -> int and imports heavy packages in run only,
# so that `pallas-hub --help` answers at once.
COMMANDS = {
    "list": "list_kernels",
    "info": "info",
    "build": "build",
    "publish": "publish",
    "download": "download",
    "verify": "verify",
    "lock": "lock",
    "serve": "serve",
    "bench": "bench",
    "doctor": "doctor",
    "demo": "demo",
    "aot": "aot",
    "tune": "tune",
}

# These run no kernel, or on the CPU alone. torch and JAX must not start other devices (both look for TPUs and warn) on
# their account.
_WITHOUT_DEVICES = {"list", "info", "build", "publish", "download", "verify", "lock", "serve", "bench", "demo"}


def build_parser() -> argparse.ArgumentParser:
    import pallas_hub

    parser = argparse.ArgumentParser(
        prog="pallas-hub",
        description="Pallas kernels for PyTorch: build, publish, load, check and measure.",
        epilog="pallas-hub COMMAND --help shows each command with an example.",
    )
    parser.add_argument("--version", action="version", version=f"pallas-hub {pallas_hub.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS.values():
        importlib.import_module(f"pallas_hub.cli.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    args = build_parser().parse_args(argv)
    if args.command in _WITHOUT_DEVICES and getattr(args, "device", "cpu") == "cpu":
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    command = importlib.import_module(f"pallas_hub.cli.{COMMANDS[args.command]}")
    from pallas_hub.registry.errors import PallasHubError

    try:
        return command.run(args)
    except PallasHubError as error:
        print(f"pallas-hub {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"pallas-hub {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) went away: not an error of ours.
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"pallas-hub {args.command}: {_about_files(error)}", file=sys.stderr)
        return 1


def _about_files(error: OSError) -> str:
    """A file that cannot be read or written, in words."""
    place = f"{error.filename}: " if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    mend = "Free some space, or choose another place." if full else "Check its permissions, or choose another place."
    return f"{place}{error.strerror or error}. {mend}"
