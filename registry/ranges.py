"""Ranges of blobs, asynchronously: what the data plane fetches with.

A range is what was asked for, to the byte, or an error. Retries and deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from registry.credentials import Credentials
from registry.errors import IntegrityError, NotFound, Unreachable
from registry.layout import Layout
from registry.reference import parse_source
from registry.referrers import find_in_layout


class RangeReader(Protocol):
    """Reads ranges of the blobs of one source."""

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes at `offset`. RegistryError."""
        ...

    async def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        """The same, as many as `into` has, into it. After an error, or cancelled, it has anything, and may be written to for a while."""
        ...

    async def size(self, digest: str) -> int:
        """Of the blob, bytes. RegistryError."""
        ...

    async def attached(self, digest: str, artifact_type: str, max_bytes: int) -> bytes | None:
        """What is published beside the manifest with that digest, as an artifact of that type (`referrers.py`); None: nothing.
        RegistryError.
        """
        ...

    async def close(self) -> None: ...


class Closing(Protocol):
    """What must be closed."""

    async def close(self) -> None: ...


class Connections:
    """The connections of all readers that share it, bounded for each host: a registry's repositories are one host, and so is the storage
    that it redirects to.

    `per_host`: at most. `timeout_s`: to connect, and between two pieces of an answer. Used and closed on one event loop.
    """

    def __init__(self, *, per_host: int = 16, timeout_s: float = 30.0) -> None:
        self.per_host = per_host
        self.timeout_s = timeout_s
        self.without_referrers: set[str] = set()
        """Registries that do not list what is beside a manifest."""
        self.session: Closing | None = None
        """Made when it is first needed, by whoever speaks HTTP: its library takes a quarter of a second to import."""

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


async def open_ranges(source: str, *, credentials: Credentials | None = None, connections: Connections | None = None) -> RangeReader:
    """`source`: `oci:/abs/dir` or `http(s)://host:port/repo`. Nothing is asked yet. InvalidReference.

    `connections`: to be shared with other readers, and closed after them; None: its own.
    """
    directory, host, repository = parse_source(source)
    if directory is not None:
        return LayoutRanges(Layout(directory))
    from registry.http_ranges import HttpRanges  # imports aiohttp

    return HttpRanges(source.partition("://")[0], host, repository, credentials, connections)


class LayoutRanges:
    """Ranges from a local layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    async def read(self, digest: str, offset: int, size: int) -> bytes:
        data = bytearray(size)
        await self.read_into(digest, offset, memoryview(data))
        return bytes(data)

    async def read_into(self, digest: str, offset: int, into: memoryview) -> None:
        await asyncio.to_thread(self._read, digest, offset, into)

    async def size(self, digest: str) -> int:
        return await asyncio.to_thread(self._size, digest)

    async def attached(self, digest: str, artifact_type: str, max_bytes: int) -> bytes | None:
        return await asyncio.to_thread(find_in_layout, self._layout, digest, artifact_type, max_bytes)

    async def close(self) -> None:
        return None

    def _read(self, digest: str, offset: int, into: memoryview) -> None:
        path = self._layout.blob_path(digest)
        at = 0
        with _translated(str(path)), path.open("rb", buffering=0) as file:
            while at < len(into) and (n := os.preadv(file.fileno(), [into[at:]], offset + at)):
                at += n
        if at != len(into):
            raise IntegrityError(f"{path}: expected {len(into)} bytes at {offset}, received {at}: it is cut off")

    def _size(self, digest: str) -> int:
        path = self._layout.blob_path(digest)
        with _translated(str(path)):
            return path.stat().st_size


@contextmanager
def _translated(place: str) -> Iterator[None]:
    """The seam: what the file system raises becomes ours."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{place}: there is no such blob") from None
    except OSError as error:
        raise Unreachable(f"{place}: cannot be read: {error.strerror}") from error
