"""One thing that the doctor looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Finding:
    """`value` is what was found, `words` what it means; `mend` is what to do when the verdict is broken."""

    section: str
    name: str
    value: str
    verdict: Verdict = "ok"
    words: str = ""
    mend: str = ""

    def __post_init__(self) -> None:
        if self.verdict == "broken" and not self.mend:
            raise AssertionError(f"{self.name}: a broken finding must come with its mend")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
