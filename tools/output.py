"""How results look: plain columns for people, JSON for programs, bars on a terminal only."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one JSON value on stdout")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as their longest cell; numbers to the right."""
    body = [[str(cell) for cell in row] for row in rows]
    right = [bool(body) and all(re.match(r"^[\d.]", row[i]) for row in body if row[i]) for i in range(len(headers))]
    widths = [max(len(row[i]) for row in [list(headers), *body]) for i in range(len(headers))]
    for row in [list(headers), *body]:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())


def size(number: float) -> str:
    """Bytes for people: 17 B, 4.1 kB, 12.3 MB (powers of 1,000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.95 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def parse_size(text: str) -> int:
    """512M, 2g, 1.5GiB, 4096: bytes, units of 1,024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"a size such as 512M or 2GiB was expected, received {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def parse_variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"NAME=VALUE was expected, received {text!r}")
    return name, value


def say(text: str) -> None:
    """Chatter: stderr."""
    print(text, file=sys.stderr, flush=True)
