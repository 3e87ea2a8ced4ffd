"""Which models write their experts alike: same layout, same gate, same activation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from moe_models import Case


def one_of_each_structure(cases: Iterable[Case]) -> list[Case]:
    first: dict[tuple[str, str], Case] = {}
    for case in cases:
        first.setdefault(_structure(case), case)
    return list(first.values())


def _structure(case: Case) -> tuple[str, str]:
    """The decorator's options, and the code of forward and gate without comments and type hints."""
    source = case.path.read_text(encoding="utf-8")
    match = re.search(
        rf"^@use_experts_implementation([^\n]*)\n(?:@[^\n]*\n)*class {case.experts}\b", source, re.MULTILINE
    )
    assert match is not None
    body = source[match.end() :].split("\n\n\n", 1)[0]
    return match[1], inspect.cleandoc(_without_comments(body[body.index("def forward") :]))


def _without_comments(code: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"#[^\n]*", "", code))
