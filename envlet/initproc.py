"""The daemon's side of pid 1 (csrc/init.c): commands out, their results back, over one socket.

Every result is exact: the status as the kernel gave it, the time as pid 1 measured it, the last 16 KiB of output.
Nothing is believed before `ready`: if the socket ends first, the environment did not start.
"""

import os
from collections.abc import Sequence

import attrs
import trio

from envlet.types import InitResult

LINE_MAX_BYTES = 4096
TAIL_MAX_BYTES = 16384


class ProtocolError(Exception):
    """Pid 1 said something that it does not say: a defect, or a program in its place."""


def encode_commands(commands: Sequence[str]) -> bytes:
    """What pid 1 reads: each command and a NUL."""
    return b"".join(os.fsencode(command) + b"\0" for command in commands)


def exit_code(wait_status: int) -> int:
    """The exit code of a wait status, 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


@attrs.define
class Reports:
    """The reports of pid 1, from its bytes as they come."""

    results: list[InitResult] = attrs.field(factory=list)
    ready: bool = False
    failure: str | None = None
    """Why pid 1 could not run a command at all."""
    _buffer: bytearray = attrs.field(factory=bytearray)

    def feed(self, data: bytes) -> None:
        """Takes what came. Raises ProtocolError."""
        self._buffer += data
        while self._take_one():
            pass

    def _take_one(self) -> bool:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > LINE_MAX_BYTES:
                raise ProtocolError(f"a report line of more than {LINE_MAX_BYTES} bytes")
            return False
        line = bytes(self._buffer[:end])
        words = line.split(b" ")
        if words == [b"ready"]:
            self.ready, size = True, 0
        elif words[0] == b"failed":
            self.failure, size = line.removeprefix(b"failed ").decode(errors="replace"), 0
        else:
            if words[0] != b"command" or len(words) != 5 or not all(word.isdigit() for word in words[1:]):
                raise ProtocolError(f"expected 'command', 'ready' or 'failed', received {line[:80]!r}")
            index, status, wall_us, size = (int(word) for word in words[1:])
            if index != len(self.results) or size > TAIL_MAX_BYTES:
                raise ProtocolError(f"a report out of order or too large: {line!r}")
            if len(self._buffer) - end - 1 < size:
                return False
            tail = bytes(self._buffer[end + 1 : end + 1 + size]).decode(errors="replace")
            self.results.append(InitResult(exit_code=exit_code(status), wall_s=wall_us / 1e6, output_tail=tail))
        del self._buffer[: end + 1 + size]
        return True


async def read_reports(stream: trio.SocketStream, reports: Reports) -> None:
    """Reads until `ready` or the end. Cancelled, it can be called again and loses nothing. Raises ProtocolError."""
    while not reports.ready:
        try:
            data = await stream.receive_some(65536)
        except trio.BrokenResourceError:
            data = b""
        if not data:
            return
        reports.feed(data)


async def send_commands(stream: trio.SocketStream, commands: Sequence[str]) -> None:
    """Sends all commands and their end. A pid 1 that is gone is noticed by who reads its reports."""
    try:
        await stream.send_all(encode_commands(commands))
        await stream.send_eof()
    except trio.BrokenResourceError:
        return
