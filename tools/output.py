"""How results look: plain columns for people, JSON for programs, bars on a terminal only."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one JSON value on stdout")


def print_json(value: Any) -> None:
    """UTF-8; a byte of a name that is not stays an escape."""
    print(json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace").decode())


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


def parse_memory(text: str) -> int:
    """A size, at least what an environment's process needs to begin."""
    number = parse_size(text)
    if number < 4 << 20:
        raise argparse.ArgumentTypeError(f"4M or more was expected, received {text!r}")
    return number


def parse_cores(text: str) -> float:
    number = _number(text, "a number of cores such as 0.5 or 2")
    if not 0 < number <= 4096:
        raise argparse.ArgumentTypeError(f"more than 0 and at most 4096 cores were expected, received {text!r}")
    return number


def parse_seconds(text: str) -> float:
    number = _number(text, "a number of seconds such as 90 or 0.5")
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"more than 0 seconds were expected, received {text!r}; for no limit leave the option out")
    return number


def _number(text: str, expected: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{expected} was expected, received {text!r}") from None


def parse_absolute(text: str) -> str:
    """A path inside the environment."""
    if not text.startswith("/") or len(os.fsencode(text)) > 4095:
        raise argparse.ArgumentTypeError(f"an absolute path of at most 4,095 bytes was expected, received {clip(text, 100)!r}")
    return text


def clip(text: str, width: int) -> str:
    """The first line of a text, cut to `width` characters, the last of them … when something is missing."""
    line = text.partition("\n")[0]
    return text if len(text) <= width and line == text else line[: width - 1] + "…"


def parse_variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"NAME=VALUE was expected, received {text!r}")
    return name, value


def say(text: str) -> None:
    """Chatter: stderr."""
    print(text, file=sys.stderr, flush=True)
