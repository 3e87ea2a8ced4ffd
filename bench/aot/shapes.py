"""Shapes a user writes: 'm=4096,n=5120', in the kernel's own letters, with flags such as 'residual' behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LARGEST = 1 << 22  # of one letter: routing and grid are walked row by row


def parse_shape(
    kernel: str, text: str, example: Mapping[str, int], flags: Sequence[str] = ()
) -> tuple[dict[str, int], frozenset[str]]:
    """The value of each letter, and the flags that were set.

    Raises   ValueError: a letter is missing, unknown, given twice, or no number from 1 to LARGEST.
    """
    values: dict[str, int] = {}
    found = set()
    fault = ""
    for part in text.split(","):
        letter, equals, number = (side.strip() for side in part.partition("="))
        if not equals and letter in flags:
            found.add(letter)
        elif letter not in example or not equals:
            fault = fault or f"{part.strip()!r} is unknown"
        elif letter in values:
            fault = fault or f"{letter} is there twice"
        elif not (number.isascii() and number.isdigit() and len(number) < 10 and 1 <= int(number) <= LARGEST):
            fault = fault or f"{letter} must be from 1 to {LARGEST}"
        else:
            values[letter] = int(number)
    missing = [letter for letter in example if letter not in values]
    fault = fault or (f"no {', '.join(missing)}" if missing else "")
    if fault:
        shown = ",".join(f"{letter}={value}" for letter, value in example.items())
        more = f", and if wanted {', '.join(flags)}" if flags else ""
        raise ValueError(f"{kernel}: --shape takes {', '.join(example)}{more}, as in {shown}; got {text!r}: {fault}.")
    return values, frozenset(found)


def is_shape(case: str) -> bool:
    """Names of workloads hold no '='."""
    return "=" in case
