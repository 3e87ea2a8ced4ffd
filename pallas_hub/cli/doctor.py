"""`pallas-hub doctor`: what is installed, what would run here, and what is wrong."""

from __future__ import annotations

import argparse
import json

_EPILOG = """\
examples:
  pallas-hub doctor
  pallas-hub doctor --json | jq '.findings[] | select(.verdict == "broken")'

Nothing is changed and no TPU is initialised. The exit code is 1 when something is broken; each broken line is
followed by its mend.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="versions, devices, variants, Hub and cache, and what is wrong with them",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pallas_hub import doctor

    findings = doctor.diagnose()
    healthy = all(finding.verdict != "broken" for finding in findings)
    if args.json:
        print(json.dumps({"healthy": healthy, "findings": [finding.to_json() for finding in findings]}, indent=2))
    else:
        print(doctor.text(findings))
    return 0 if healthy else 1
