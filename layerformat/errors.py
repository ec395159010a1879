"""The errors of the layer format: one tree, each saying what was expected, what was received and what to do.

`FormatError`       a layer breaks a rule of docs/format.md: damaged, truncated, or not a layer.
`UnsupportedEntry`  a source holds something that a layer cannot say: refused by its name, never left out.
`SourceError`       a source cannot be read as what it claims to be: damaged archive, truncated stream, file changed
meanwhile.
"""

from __future__ import annotations

import contextlib
import os

_SHOWN_BYTES = 100  # of each end of a long name


def printable(name: bytes, *, whole: bool = False) -> str:
    """A name of any bytes, for a message: undecodable and control bytes are shown as escapes, and of more than 200 bytes
    the first and the last 100, unless the `whole` name is asked for.
    """
    if whole or len(name) <= 2 * _SHOWN_BYTES:
        return _escaped(name)
    head, tail = name[:_SHOWN_BYTES], name[-_SHOWN_BYTES:]
    with contextlib.suppress(UnicodeDecodeError):
        name.decode()
        head, tail = (part.decode("utf-8", "ignore").encode() for part in (head, tail))  # no half characters
    return f"{_escaped(head)} … {_escaped(tail)}"


def _escaped(name: bytes) -> str:
    text = os.fsdecode(name)
    if text.isprintable():
        return text
    return name.decode("ascii", "backslashreplace").encode("unicode_escape").decode("ascii").replace("\\\\x", "\\x")


class LayerError(Exception):
    """The root of everything that this package raises on purpose."""


class FormatError(LayerError):
    """A layer breaks a rule of docs/format.md. `table` and `index` say where, `source` which file."""

    advice = "the layer is damaged or is not one: fetch it again, or convert it again from its source"

    def __init__(self, table: str, index: int | None, expected: object, received: object, *, source: str | None = None) -> None:
        super().__init__(table, index, expected, received)
        self.table = table
        self.index = index
        self.expected = expected
        self.received = received
        self.source = source

    @property
    def finding(self) -> str:
        """What is wrong, without where it is and what to do."""
        return f"expected {self.expected}, received {self.received}"

    def __str__(self) -> str:
        where = self.table if self.index is None else f"{self.table}[{self.index}]"
        prefix = f"{self.source}: " if self.source else ""
        return f"{prefix}{where}: {self.finding}; {self.advice}"


class UnsupportedEntry(LayerError):
    """A source entry that a layer cannot say. `name` is its path in the source, `why` the rule it breaks and the remedy."""

    def __init__(self, name: bytes, why: str) -> None:
        super().__init__(name, why)
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"{printable(self.name) or '(empty name)'}: {self.why}"


class SourceError(LayerError):
    """A source that cannot be read. `offset` is in bytes of the (decompressed) archive, `name` the entry being read."""

    def __init__(self, source: str, what: str, *, name: bytes | None = None, offset: int | None = None) -> None:
        super().__init__(source, what)
        self.source = source
        self.what = what
        self.name = name
        self.offset = offset

    def __str__(self) -> str:
        where = self.source
        if self.offset is not None:
            where += f" at byte {self.offset}"
        if self.name is not None:
            where += f", entry {printable(self.name)}"
        return f"{where}: {self.what}"
