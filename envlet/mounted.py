"""Which plans the data plane serves, and for how many environments: kept a while when unused, so that the next one
starts warm.
"""

import logging
from collections.abc import Callable, Sequence

import attrs
import trio

from envlet import errors
from envlet.errors import EnvletError
from envlet.ports import DataPlane, LayerRef, MountedPlan

log = logging.getLogger("envlet")


@attrs.define(eq=False)
class _Adding:
    """A request to the data plane, which carries it out whether anybody still waits or not."""

    done: trio.Event = attrs.field(factory=trio.Event)
    error: Exception | None = None


@attrs.define(eq=False)
class _Entry:
    users: int = 0
    plan: MountedPlan | None = None
    adding: _Adding | None = None
    lock: trio.Lock = attrs.field(factory=trio.Lock)
    last_use: int = 0


class MountedPlans:
    """Counts the users of each plan. Keyed by the ordered layers, as the data plane's own plans are."""

    def __init__(
        self,
        data_plane: DataPlane,
        max_unused: int = 64,
        *,
        images: bool = False,
        stacked: bool = False,
        on_unused: Callable[[MountedPlan], None] | None = None,
    ) -> None:
        """`images`, `stacked`: of `DataPlane.add_plan`. `on_unused` is called, in a thread, before a plan is removed."""
        self._data_plane = data_plane
        self._images = images
        self._stacked = stacked
        self._on_unused = on_unused
        self._max_unused = max_unused
        self._entries: dict[tuple[str, ...], _Entry] = {}
        self._clock = 0
        self._failed_removals = 0

    def statistics(self) -> dict[str, int]:
        used = sum(entry.users > 0 for entry in self._entries.values())
        return {"used": used, "unused": len(self._entries) - used, "unused_max": self._max_unused, "failed_removals": self._failed_removals}

    async def acquire(self, layers: Sequence[LayerRef]) -> MountedPlan:
        """The plan, for one more user. Raises EnvletError(MOUNT_FAILED) or what the data plane raises."""
        if not layers:
            raise EnvletError(errors.MOUNT_FAILED, "the groups have no layers; push one with a layer first")
        key = tuple(layer.digest for layer in layers)
        entry = self._entries.setdefault(key, _Entry())
        entry.users += 1
        try:
            async with entry.lock:
                if entry.plan is None:
                    adding = entry.adding or self._begin_adding(key, entry, layers)
                    await adding.done.wait()
                    if adding.error is not None:
                        raise adding.error
                assert entry.plan is not None
                return entry.plan
        except BaseException:
            entry.users -= 1
            self._drop_if_void(key, entry)
            raise

    def _begin_adding(self, key: tuple[str, ...], entry: _Entry, layers: Sequence[LayerRef]) -> _Adding:
        """In a task of its own: when the last who waits is cancelled, the plan will be served all the same, and must be known here."""
        adding = entry.adding = _Adding()

        async def add() -> None:
            try:
                entry.plan = await self._data_plane.add_plan(layers, images=self._images, stacked=self._stacked)
            except Exception as error:
                adding.error = error
            finally:
                entry.adding = None
                self._drop_if_void(key, entry)
                adding.done.set()

        trio.lowlevel.spawn_system_task(add)
        return adding

    def _drop_if_void(self, key: tuple[str, ...], entry: _Entry) -> None:
        if entry.users == 0 and entry.plan is None and entry.adding is None and self._entries.get(key) is entry:
            del self._entries[key]

    def adopt(self, layers: Sequence[LayerRef], plan: MountedPlan) -> None:
        """One more user of a plan that the data plane serves already."""
        entry = self._entries.setdefault(tuple(layer.digest for layer in layers), _Entry())
        entry.users += 1
        entry.plan = plan

    def served(self) -> frozenset[str]:
        """The ids of the plans that are known here."""
        return frozenset(entry.plan.plan_id for entry in self._entries.values() if entry.plan is not None)

    async def release(self, layers: Sequence[LayerRef]) -> None:
        """One user less."""
        entry = self._entries[tuple(layer.digest for layer in layers)]
        entry.users -= 1
        self._clock += 1
        entry.last_use = self._clock
        await self._shrink(self._max_unused)

    async def close(self) -> None:
        """Removes every plan that nobody uses."""
        await self._shrink(0)

    async def _shrink(self, keep: int) -> None:
        unused = sorted((entry.last_use, key) for key, entry in self._entries.items() if entry.users == 0 and entry.adding is None)
        for _, key in unused[: max(0, len(unused) - keep)]:
            entry = self._entries.get(key)
            if entry is None:
                continue
            async with entry.lock:
                if entry.users == 0 and entry.plan is not None:
                    plan, entry.plan = entry.plan, None
                    try:
                        if self._on_unused is not None:
                            await trio.to_thread.run_sync(self._on_unused, plan)
                        await self._data_plane.remove_plan(plan.plan_id)
                    except (EnvletError, OSError) as error:  # it goes with the data plane; no environment is worse for it
                        self._failed_removals += 1
                        log.error("plan %s is still served: %s", plan.plan_id, error)
                self._drop_if_void(key, entry)
