"""The XLA operations around the kernels: what the compiler itself estimates for them.

The dump of the whole program (`*-TLP-hlo.txt`) names each operation of the entry computation; the static profile has
the cycles the compiler expects for each. Those cycles ignore that operations share HBM, so an operation is modelled as
the larger of its estimate and the time its operands and results need at the published bandwidth. An operation that
reads part of an operand (a gather, a slice) is counted with all of it. Gaps between operations are not in it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from pallas_hub.bench.aot.errors import DumpError
from pallas_hub.bench.aot.hardware import Hardware

_ENTRY = re.compile(r"^ENTRY [^{]*\{\n(?P<body>.*?)^\}", re.DOTALL | re.MULTILINE)
_OPERATION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.<>-]+) = (?P<type>\([^=]*\)|\S+) (?P<opcode>[\w-]+)\((?P<operands>[^)]*)\)"
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\](?P<layout>\{[^}]*\})?")
_ESTIMATE = re.compile(r'hlo_op_name: "(?P<name>[^"]+)"\s+estimated_cycles: (?P<cycles>\d+)')
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "copy-done",
}
# Between HBM and VMEM, beside other operations: they cost bandwidth only.
_COPIES = {"copy-start", "slice-start", "async-start"}
_SCALARS = 256  # bytes; an operation on less than that, and without an estimate, runs on the scalar core for nothing
_BITS = {"pred": 8, "s4": 4, "u4": 4}


@dataclass(frozen=True)
class XlaOperation:
    name: str
    opcode: str
    cycles: int
    hbm_bytes: int

    def time_us(self, hardware: Hardware) -> float:
        return max(hardware.cycles_us(self.cycles), hardware.bandwidth_us(self.hbm_bytes))


def read_operations(dump: Path) -> list[XlaOperation]:
    """Operations of the entry computation that are not Pallas kernels and cost something.

    Raises   DumpError: the dump has no program, or no profile.
    """
    programs = sorted(dump.glob("*-TLP-hlo.txt"))
    cycles = _read_profile(dump / "profile")
    entry = _ENTRY.search(programs[-1].read_text(errors="replace")) if programs else None
    if entry is None:
        raise DumpError("no program in the compiler's dump")
    operations, sizes = [], {}
    for line in entry["body"].splitlines():
        match = _OPERATION.match(line)
        if match is None:
            continue
        sizes[match["name"]] = size = _hbm_bytes(match["type"])
        if match["opcode"] in _COPIES:  # its type names both ends; what waits for it is the operation that uses it
            operations.append(XlaOperation(match["name"], match["opcode"], 0, size))
            continue
        if match["opcode"] in _FREE or 'custom_call_target="tpu_custom_call"' in line:
            continue
        operands = {name.strip().lstrip("%") for name in re.findall(r"%[\w.<>-]+", match["operands"])}
        moved = size + sum(sizes.get(name, 0) for name in operands)
        operations.append(XlaOperation(match["name"], match["opcode"], cycles.get(match["name"], 0), moved))
    if not cycles and any(operation.hbm_bytes > _SCALARS for operation in operations):
        raise DumpError("no profile in the compiler's dump")
    return [operation for operation in operations if operation.cycles or operation.hbm_bytes > _SCALARS]


def _read_profile(folder: Path) -> dict[str, int]:
    """Operation name -> cycles the compiler expects."""
    cycles = {}
    for path in folder.glob("*_static_llo_profile.textproto"):
        for match in _ESTIMATE.finditer(path.read_text(errors="replace")):
            cycles[match["name"]] = int(match["cycles"])
    return cycles


def _hbm_bytes(type_text: str) -> int:
    """Bytes of the arrays in an HLO type that lie in HBM: those whose layout names no other memory as in `S(1)`."""
    total = 0
    for array in _ARRAY.finditer(type_text):
        if "S(" in (array["layout"] or ""):
            continue
        digits = re.search(r"\d+", array["dtype"])
        width = _BITS.get(array["dtype"]) or (int(digits[0]) if digits else 32)
        total += math.prod(int(n) for n in array["shape"].split(",") if n) * width // 8
    return total
