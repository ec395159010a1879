"""Blocking reads and writes on a client's descriptor, in a thread that can still be cancelled.

The descriptor may be a pipe whose other end stalls for ever. Making it non-blocking would change the client's own end
of the same open file, so each step first asks poll whether it can go on, and writes to a pipe no more than the kernel
takes at once (PIPE_BUF). Between steps the thread looks whether its task was cancelled.
"""

import os
import select
import stat
from collections.abc import Callable

_POLL_MS = 200
_PIPE_PIECE_BYTES = 4096
_FILE_PIECE_BYTES = 1 << 20


class CancellableFile:
    """A file over a borrowed descriptor. `check` raises when the work is to be given up
    (`trio.from_thread.check_cancelled`).
    """

    def __init__(self, fd: int, check: Callable[[], None]) -> None:
        self._fd = fd
        self._check = check
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._poll = select.poll()
        self.position = 0
        """Bytes read or written so far."""

    def _wait(self, events: int) -> None:
        self._check()
        if self._is_file:
            return
        self._poll.register(self._fd, events)
        while not self._poll.poll(_POLL_MS):
            self._check()

    def read(self, size: int = -1, /) -> bytes:
        """Exactly `size` bytes, fewer only at the end. Raises OSError."""
        pieces: list[bytes] = []
        while size != 0:
            self._wait(select.POLLIN)
            piece = os.read(self._fd, _FILE_PIECE_BYTES if size < 0 else min(size, _FILE_PIECE_BYTES))
            if not piece:
                break
            pieces.append(piece)
            self.position += len(piece)
            size -= len(piece) if size > 0 else 0
        return b"".join(pieces)

    def write(self, data: bytes, /) -> int:
        """All of it. Raises OSError: BrokenPipeError if nobody reads any more."""
        view = memoryview(data)
        piece = _FILE_PIECE_BYTES if self._is_file else _PIPE_PIECE_BYTES
        while view:
            self._wait(select.POLLOUT)
            written = os.write(self._fd, view[:piece])
            view = view[written:]
            self.position += written
        return len(data)
