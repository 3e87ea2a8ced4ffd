"""How the numbers of a quantised weight are stored. Needs neither torch nor JAX.

weight[r, c] = number[r, c] * scale[r // rows, c // columns]      for each expert's weight (in, out)

int8    int8 (in, out)
fp8     float8_e4m3fn (in, out)
int4    uint8 (ceil(in / 2), out): rows 2 * r and 2 * r + 1 share byte r, the first in its low half; -8 ... 7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KINDS = {"int8": "int8", "float8_e4m3fn": "fp8", "uint8": "int4"}  # by data's dtype
GROUPS = (32, 64, 128)  # rows that may share a scale, if not all do
SQUARE = 128  # columns that may, if neither one nor all do
ALL = 0


@dataclass(frozen=True)
class Stored:
    kind: str
    rows: int  # that share a scale, or ALL
    columns: int

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    def data_rows(self, rows: int) -> int:
        """Of an array that holds this many rows of the weight."""
        return -(-rows // 2) if self.kind == "int4" else rows

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """(a, b) of a weight (rows, columns)."""
        return (
            1 if self.rows == ALL else -(-rows // self.rows),
            1 if self.columns == ALL else -(-columns // self.columns),
        )


FORMATS = {  # by name, as users choose them
    "int8": Stored("int8", ALL, 1),
    "fp8": Stored("fp8", ALL, 1),
    "fp8-tensor": Stored("fp8", ALL, ALL),
    "fp8-block": Stored("fp8", 128, 128),
    "int4": Stored("int4", 128, 1),
    "int4-g64": Stored("int4", 64, 1),
    "int4-g32": Stored("int4", 32, 1),
}


def stored_as(dtype: Any, scale_shape: tuple[int, ...], rows: int, columns: int) -> Stored:
    """What data of this dtype and a scale (e, a, b) say of a weight (e, rows, columns).

    Raises   ValueError: no block size makes a scale of that shape.
    """
    kind, (_, a, b) = KINDS[str(dtype)], scale_shape
    for group in (ALL, *GROUPS):
        for square in (ALL, 1, SQUARE):
            stored = Stored(kind, group, square)
            if stored.scale_shape(rows, columns) == (a, b):
                return stored
    raise ValueError(
        f"moe_experts: a scale must be (e, a, b), a = 1 or ceil(in / 32, 64 or 128), b = 1, out or ceil(out / 128), "
        f"for a weight (e, in, out) = (e, {rows}, {columns}); got {tuple(scale_shape)}."
    )
