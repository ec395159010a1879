"""Recording what is read of layers, and using what was recorded: a layer's profile is loaded when it is opened, prefetched, and written
anew when its last plan goes (docs/fill.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence

import attrs

from registry import RegistryError
from weefs.core import ChunkIndex, Core, CoreError, LayerSlot
from weefs.fetch import in_thread
from weefs.log import say, say_traceback
from weefs.prefetch import Prefetch, Prefetcher
from weefs.profiles import Profile, ProfileRefused, ProfileStore, after_run, merged, published_profile, within_trust

SAVED_EVERY_S = 60.0
NO_PROFILES = {"prefetched_bytes": 0, "used_bytes": 0, "planned_ranges": 0, "recorded_layers": 0}
"""statistics() where nothing is recorded."""


@attrs.define(eq=False)
class Recording:
    """Of a layer that is open. `cold`: until its first run ends, if the kernel held nothing of the layer when it was opened."""

    slot: LayerSlot
    digest: str
    layer_chunks: int
    cold: bool
    base: Profile | None = None
    touched: list[ChunkIndex] = attrs.field(factory=list)
    saved: int = 0
    """How many of `touched` are in the file."""
    sizes: dict[int, int] = attrs.field(factory=dict)
    """Raw bytes of the chunks of both."""
    prefetch: Prefetch | None = None
    looking: asyncio.Task[None] | None = None
    ended: bool = False
    """Its first run is over: nothing is prefetched any more."""


class Recorder:
    """Of one core; everything on its event loop. Failures cost a profile and nothing else."""

    def __init__(self, core: Core, store: ProfileStore, prefetcher: Prefetcher) -> None:
        self._core = core
        self._store = store
        self._prefetcher = prefetcher
        self._recordings: dict[LayerSlot, Recording] = {}
        self.used_bytes = 0

    async def run(self) -> None:
        """Saves every minute what was recorded, until cancelled."""
        while True:
            await asyncio.sleep(SAVED_EVERY_S)
            for recording in [*self._recordings.values()]:
                await self._save(recording, ends=False)

    # ---- the life of a layer ----

    async def load(self, digest: str) -> Profile | None:
        """What is known of a layer, before it is `opened`."""
        return await asyncio.to_thread(self._store.load, digest)

    def opened(
        self, slot: LayerSlot, digest: str, profile: Profile | None, *, cold: bool, published: Awaitable[bytes | None] | None = None
    ) -> None:
        """A layer is open; `cold`: the kernel holds nothing of it. Prefetches its profile; without one, that of the `published` document,
        as soon as that is there, if there is any. The layer stays until `closed`.
        """
        recording = Recording(slot, digest, self._core.layer_info(slot).chunks, cold)
        self._recordings[slot] = recording
        if profile is not None and profile.layer_chunks == recording.layer_chunks:
            self._use(recording, profile)
        elif published is not None:
            recording.looking = asyncio.create_task(self._look(recording, published))

    def has(self, digest: str) -> bool:
        """Whether there is a profile of a layer on the disk."""
        return self._store.path(digest).exists()

    async def _look(self, recording: Recording, published: Awaitable[bytes | None]) -> None:
        try:
            data = await asyncio.shield(published)  # other layers of the group ask for the same
            if data is None or recording.ended:
                return
            profile = published_profile(data, recording.digest, recording.layer_chunks)
            if profile is not None:
                self._learn_sizes(recording, profile.chunks)
                self._use(recording, within_trust(profile, recording.sizes, self._core.layer_info(recording.slot).stream_size))
        except (RegistryError, ProfileRefused) as error:
            say(f"no published profile of {recording.digest}: {error}")
        except Exception:  # a bug of ours costs a profile
            say_traceback()

    def _use(self, recording: Recording, profile: Profile) -> None:
        recording.base = profile
        self._learn_sizes(recording, profile.chunks)
        if recording.cold:
            recording.prefetch = self._prefetcher.begin(recording.slot, [ChunkIndex(chunk) for chunk in profile.chunks])

    async def unused(self, slot: LayerSlot) -> None:
        """The last plan of a layer is gone: its run ends. If there is another before the layer is closed, it is a warm one. May be said
        again.
        """
        recording = self._recordings.get(slot)
        if recording is None:
            return
        self._stop(recording)
        await self._save(recording, ends=True)

    def closed(self, slot: LayerSlot) -> None:
        """The layer is closed."""
        recording = self._recordings.pop(slot, None)
        if recording is not None:
            self._stop(recording)

    def _stop(self, recording: Recording) -> None:
        recording.ended = True
        if recording.prefetch is not None:
            recording.prefetch.ended = True
        if recording.looking is not None:
            recording.looking.cancel()

    async def close(self) -> None:
        """Ends what looks for published profiles."""
        looking = [one.looking for one in self._recordings.values() if one.looking is not None]
        for task in looking:
            task.cancel()
        if looking:
            await asyncio.wait(looking)

    # ---- recording ----

    def _collect(self, recording: Recording) -> None:
        """Takes what was read meanwhile."""
        with contextlib.suppress(CoreError):  # it was closed a moment ago
            recording.touched += self._core.first_touches(recording.slot, len(recording.touched))
        if recording.prefetch is not None and recording.prefetch.fetched:
            read = set(recording.touched)
            fetched = recording.prefetch.fetched
            for chunk in [chunk for chunk in fetched if chunk in read]:
                self.used_bytes += fetched.pop(chunk).stored_size

    def _learn_sizes(self, recording: Recording, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            if chunk not in recording.sizes:
                recording.sizes[chunk] = self._core.describe(recording.slot, ChunkIndex(chunk)).raw_size

    async def _save(self, recording: Recording, *, ends: bool) -> None:
        self._collect(recording)
        counts = ends and recording.cold and bool(recording.touched)
        if not counts and len(recording.touched) == recording.saved:
            return
        self._learn_sizes(recording, recording.touched)
        make = after_run if counts else merged
        profile = make(recording.base, recording.digest, recording.layer_chunks, recording.touched, recording.sizes)
        recording.saved = len(recording.touched)
        if counts:
            recording.base, recording.cold = profile, False
        try:
            await in_thread(self._store.save, profile)
        except OSError as error:
            say(f"the profile of {recording.digest} cannot be written: {error}")

    # ---- reporting ----

    def statistics(self) -> dict[str, int]:
        """Bytes of blobs: fetched for profiles, and of them those that were read later; layers that are recorded."""
        for recording in self._recordings.values():
            self._collect(recording)
        return {
            "prefetched_bytes": self._prefetcher.fetched_bytes,
            "used_bytes": self.used_bytes,
            "planned_ranges": self._prefetcher.planned,
            "recorded_layers": len(self._recordings),
        }
