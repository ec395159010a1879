"""Layers that peers want: kept open while they are sent, and some minutes longer, so that not every request opens them anew.

A layer that this node does not serve is opened as the asker describes it, if its source may be used for peers (peerconfig.may_open). Its
TOC must be the one that the asker has, or the bytes are of no use to it.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import attrs

from registry import RegistryError
from weefs.core import ChunkIndex, Core, CoreError, LayerSlot
from weefs.errors import WeefsError
from weefs.protocol import Layer

KEPT_S = 300.0
"""After the last request for it, a layer that only peers want."""
MAX_KEPT = 256
CLEARED_EVERY_S = 30.0


class MayNotOpen(WeefsError):
    """A layer of a source that peers may not make this node open."""


@attrs.frozen(eq=False)
class Borrowed:
    """A layer that cannot be closed until it is given back. `owner`: the data plane's own record of it."""

    slot: LayerSlot
    data: Path
    toc_digest: str
    owner: Any


class Lender(Protocol):
    """The data plane, as far as peers need it."""

    async def borrow(self, digest: str, layer: Layer | None) -> Borrowed | None:
        """Opens a layer that is not open, if it is described. None: it is neither. What opening a layer raises."""
        ...

    def give_back(self, borrowed: Borrowed) -> None: ...

    def describe(self, digest: str) -> Layer | None:
        """For a peer to open it."""
        ...

    def sources(self) -> set[str]:
        """Of the layers of its plans."""
        ...

    async def bring(self, slot: LayerSlot, chunks: list[ChunkIndex], *, claim: bool) -> None:
        """Fetcher.bring()."""
        ...


@attrs.frozen(eq=False)
class Lent:
    """A layer that stays open while it is lent. `data_fd`: its stream, with a position of its own; closed by give_back()."""

    borrowed: Borrowed
    data_fd: int

    @property
    def slot(self) -> LayerSlot:
        return self.borrowed.slot


@attrs.define
class _Kept:
    borrowed: Borrowed
    until_s: float


class Lending:
    """What this node has for its peers. On one event loop."""

    def __init__(self, core: Core, lender: Lender, may_open: Callable[[str, set[str]], bool], *, kept_s: float = KEPT_S) -> None:
        """`may_open`: whether a source may be opened for peers, given the sources that are in use anyhow."""
        self._core = core
        self._lender = lender
        self._may_open = may_open
        self._kept_s = kept_s
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._opening: dict[str, asyncio.Task[None]] = {}

    @property
    def kept(self) -> int:
        """Layers that are open for the sake of peers."""
        return len(self._kept)

    async def run(self) -> None:
        """Lets go of what nobody has asked for lately, until cancelled."""
        while True:
            await asyncio.sleep(min(CLEARED_EVERY_S, self._kept_s))
            self.clear(asyncio.get_running_loop().time())

    def clear(self, now_s: float) -> None:
        for digest in [digest for digest, kept in self._kept.items() if kept.until_s <= now_s]:
            self._lender.give_back(self._kept.pop(digest).borrowed)

    async def close(self) -> None:
        """Lets go of all."""
        for task in [*self._opening.values()]:
            task.cancel()
            await asyncio.wait([task])
        self.clear(float("inf"))

    async def lend(self, digest: str, layer: Layer | None) -> Lent | None:
        """To be given back with give_back(). None: the layer is not open and not described. MayNotOpen; WeefsError; OSError."""
        if layer is not None and layer.toc_digest is None:
            raise WeefsError(f"layer {digest}: expected its description with the digest of its TOC, there is none")
        borrowed = await self._lender.borrow(digest, None)
        if borrowed is None and layer is not None:
            await self._open(layer)
            borrowed = await self._lender.borrow(digest, None)
        if borrowed is None:
            return None
        try:
            if layer is not None and layer.toc_digest != borrowed.toc_digest:
                raise WeefsError(f"layer {digest}: its TOC is {borrowed.toc_digest} here, {layer.toc_digest} there")
            if digest in self._kept:
                self._kept[digest].until_s = asyncio.get_running_loop().time() + self._kept_s
            return Lent(borrowed, os.open(borrowed.data, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self._lender.give_back(borrowed)
            raise

    def give_back(self, lent: Lent) -> None:
        os.close(lent.data_fd)
        self._lender.give_back(lent.borrowed)

    async def _open(self, layer: Layer) -> None:
        """To the end, even if nobody waits any more: the next asker finds it open. WeefsError."""
        if not self._may_open(layer.source, self._lender.sources()):
            raise MayNotOpen(f"layer {layer.digest}: its source {layer.source} may not be opened for peers; peers_sources says which may")
        task = self._opening.get(layer.digest)
        if task is None:
            if len(self._kept) + len(self._opening) >= MAX_KEPT:
                raise WeefsError(f"layer {layer.digest}: {MAX_KEPT} layers are open for peers already")
            task = self._opening[layer.digest] = asyncio.create_task(self._open_and_keep(layer))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait any more
        await asyncio.shield(task)

    async def _open_and_keep(self, layer: Layer) -> None:
        try:
            borrowed = await self._lender.borrow(layer.digest, layer)
            if borrowed is not None:
                self._kept[layer.digest] = _Kept(borrowed, asyncio.get_running_loop().time() + self._kept_s)
        except (RegistryError, OSError) as error:
            raise WeefsError(f"layer {layer.digest} cannot be opened for peers: {error}") from error
        finally:
            del self._opening[layer.digest]

    def is_open(self, digest: str) -> bool:
        return self._lender.describe(digest) is not None

    # ---- chunks ----

    def chunks_at(self, lent: Lent, offset: int, size: int) -> range:
        """Core.chunks_at()."""
        return self._core.chunks_at(lent.slot, offset, size)

    def hold(self, lent: Lent, chunks: range) -> int | None:
        """Core.hold()."""
        return self._core.hold(lent.slot, chunks)

    def unhold(self, lent: Lent, hold: int) -> bool:
        """Core.unhold()."""
        try:
            return self._core.unhold(lent.slot, hold)
        except CoreError:
            return False

    async def bring(self, lent: Lent, chunks: list[ChunkIndex], *, claim: bool) -> None:
        """Fetcher.bring()."""
        await self._lender.bring(lent.slot, chunks, claim=claim)
