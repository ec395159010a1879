"""What a successor must know to answer old node ids: which layer and which plan has which slot, and which faults nobody has acknowledged.

An append-only file of JSON lines. A line is written before what it says can be seen, except for a layer's end, which is written
afterwards: a layer that nothing uses is closed again. The file is as old as its mount, so it needs no fsync: a machine that crashes loses
both. A process that is killed in a write leaves a torn last line, which nothing was built upon, and which is cut off.

When more than half of the lines are void, the file is written anew and renamed, so its size follows what is served and not what was.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import attrs
import msgspec

from weefs.core import Place
from weefs.errors import JournalError
from weefs.log import say
from weefs.protocol import FaultEvent, Layer

VERSION = 1
MAX_FAULTS = 1024
"""Unacknowledged ones that are kept; the oldest are dropped."""
SPARE_LINES = 64
"""Void lines that are no reason to write the file anew."""


class Begin(msgspec.Struct, frozen=True, tag="weefs", kw_only=True):
    """The first line."""

    version: int = VERSION


class LayerAdded(msgspec.Struct, frozen=True, tag="layer", kw_only=True):
    slot: int
    generation: int
    layer: Layer

    @property
    def place(self) -> Place:
        return Place(self.slot, self.generation)


class LayerClosed(msgspec.Struct, frozen=True, tag="layer_closed", kw_only=True):
    """The slot may have another layer already: hence the generation."""

    slot: int
    generation: int


class PlanAdded(msgspec.Struct, frozen=True, tag="plan", kw_only=True):
    """`layers`: their slots, base first."""

    slot: int
    generation: int
    plan_id: str
    layers: list[int]

    @property
    def place(self) -> Place:
        return Place(self.slot, self.generation)


class PlanRemoved(msgspec.Struct, frozen=True, tag="plan_removed", kw_only=True):
    slot: int
    generation: int
    plan_id: str


class Faulted(msgspec.Struct, frozen=True, tag="faulted", kw_only=True):
    """`event` is encoded apart: it has a tag of its own."""

    event: msgspec.Raw


class Acknowledged(msgspec.Struct, frozen=True, tag="acknowledged", kw_only=True):
    through: int


Line = Begin | LayerAdded | LayerClosed | PlanAdded | PlanRemoved | Faulted | Acknowledged

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode
_decode_event = msgspec.json.Decoder(FaultEvent).decode


@attrs.define
class State:
    """What the lines amount to."""

    layers: dict[int, LayerAdded] = attrs.field(factory=dict)
    plans: dict[int, PlanAdded] = attrs.field(factory=dict)
    leaving: dict[str, PlanRemoved] = attrs.field(factory=dict)
    """By name: removed plans of which the kernel may not have been told."""
    faults: dict[int, FaultEvent] = attrs.field(factory=dict)
    """By number, in this order."""

    def apply(self, line: Line) -> None:
        match line:
            case LayerAdded(slot=slot):
                self.layers[slot] = line
            case LayerClosed(slot=slot, generation=generation):
                if slot in self.layers and self.layers[slot].generation == generation:
                    del self.layers[slot]
            case PlanAdded(slot=slot):
                self.plans[slot] = line
                self.leaving.pop(line.plan_id, None)
            case PlanRemoved(slot=slot, generation=generation):
                if slot in self.plans and self.plans[slot].generation == generation:
                    del self.plans[slot]
                    self.leaving[line.plan_id] = line
            case Faulted(event=encoded):
                event = _decode_event(encoded)
                self.faults[event.number] = event
                while len(self.faults) > MAX_FAULTS:
                    del self.faults[next(iter(self.faults))]
            case Acknowledged(through=through):
                for number in [number for number in self.faults if number <= through]:
                    del self.faults[number]

    def lines(self) -> list[Line]:
        """The shortest journal of the same state."""
        found: list[Line] = [Begin(), *self.layers.values(), *self.plans.values()]
        for removed in self.leaving.values():
            # It only counts as removed when it was there.
            was = PlanAdded(slot=removed.slot, generation=removed.generation, plan_id=removed.plan_id, layers=[])
            found[1:1] = [was, removed]
        return found + [faulted(event) for event in self.faults.values()]


def faulted(event: FaultEvent) -> Faulted:
    return Faulted(event=msgspec.Raw(_encode(event)))


class Journal:
    """The file, open for appending, and what it amounts to. Without a path: only the latter, for a mount of one process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._fd = -1
        self._size = 0
        self._lines = 0
        self.state = State()

    @classmethod
    def begin(cls, path: Path) -> Self:
        """A new one, for a new mount."""
        journal = cls(path)
        journal._write_anew()
        return journal

    @classmethod
    def resume(cls, path: Path) -> Self:
        """The one of the process before. JournalError: it is missing or damaged."""
        journal = cls(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise JournalError(f"{path}: expected the journal of the mount: {error.strerror}") from error
        *lines, torn = content.split(b"\n")
        if torn:
            say(f"{path}: cut off a torn last line of {len(torn)} bytes")
        for number, encoded in enumerate(lines, 1):
            try:
                line = _decode(encoded)
                journal.state.apply(line)
            except msgspec.DecodeError as error:
                raise JournalError(f"{path}, line {number}: {error}") from error
            if number == 1 and line != Begin():
                raise JournalError(f"{path}: expected a journal of version {VERSION}, received {encoded[:80]!r}")
        try:
            journal._write_anew()
        except OSError as error:  # a full disk is no reason to lose a mount
            say(f"{path}: cannot be written anew, and is gone on with: {error}")
            journal._go_on(len(content) - len(torn), len(lines))
        return journal

    @property
    def size_bytes(self) -> int:
        """Of the file; 0 without one."""
        return self._size

    def append(self, line: Line) -> None:
        """OSError: nothing was written, and nothing changed."""
        if self._path is not None:
            self._append(_encode(line) + b"\n")
        self.state.apply(line)
        self._compact()

    def told(self, name: str) -> None:
        """The kernel knows that the plan is removed."""
        self.state.leaving.pop(name, None)
        self._compact()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _append(self, encoded: bytes) -> None:
        try:
            written = os.write(self._fd, encoded)
            if written != len(encoded):
                raise OSError(28, f"{self._path}: wrote {written} of {len(encoded)} bytes")
        except OSError:
            # Half a line in the middle would be no torn one any more.
            os.ftruncate(self._fd, self._size)
            raise
        self._size += written
        self._lines += 1

    def _compact(self) -> None:
        live = 1 + len(self.state.layers) + len(self.state.plans) + 2 * len(self.state.leaving) + len(self.state.faults)
        if self._path is None or self._lines <= 2 * live + SPARE_LINES:
            return
        try:
            self._write_anew()
        except OSError as error:
            say(f"{self._path}: cannot be written anew, and grows: {error}")
            self._lines = live  # tried again when as many more are void

    def _go_on(self, size: int, lines: int) -> None:
        """Appends to what is there, without its torn end."""
        assert self._path is not None
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._size, self._lines = size, lines

    def _write_anew(self) -> None:
        assert self._path is not None
        lines = self.state.lines()
        content = b"".join(_encode(line) + b"\n" for line in lines)
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            fresh.write_bytes(content)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        fd = os.open(fresh, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.rename(fresh, self._path)
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd, self._size, self._lines = fd, len(content), len(lines)
