"""References to a plan: resolved through a bounded cache that outlives the daemon, checked by role, concatenated.

A reference with a digest is resolved once. A tag is resolved again each time, because it moves; only if the registry
is away, or does not answer in time, does the last known digest serve, and `registry_away` counts it. Callers that want the same
reference at once share one request.
"""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import msgspec
import trio

from envlet import errors
from envlet.bundle import merge_env
from envlet.errors import EnvletError
from envlet.groups import first_error
from envlet.ports import LayerRef, ResolvedGroup, Resolver
from envlet.types import GroupInfo, PlanInfo, Role

RESOLVED_AT_ONCE = 32
"""Threads of their own: those that wait for a registry that says nothing must not be what the rest of the daemon waits for."""


@attrs.frozen
class Plan:
    """Layer groups, base first, as one."""

    groups: tuple[ResolvedGroup, ...]

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        """All layers, base first."""
        return tuple(layer for group in self.groups for layer in group.layers)

    @property
    def env(self) -> tuple[str, ...]:
        """Variables of the groups, the upper over the lower."""
        return merge_env((group.env for group in self.groups), {})

    @property
    def workdir(self) -> str:
        """Of the topmost group that has one."""
        return next((group.workdir for group in reversed(self.groups) if group.workdir), "/")

    @property
    def user(self) -> str | None:
        """Of the topmost group that has one."""
        return next((group.user for group in reversed(self.groups) if group.user), None)

    def info(self) -> PlanInfo:
        """As the API says it."""
        groups = [
            GroupInfo(
                reference=group.reference,
                digest=group.digest,
                role=group.role,
                layers=[layer.digest for layer in group.layers],
                size_bytes=sum(layer.size_bytes for layer in group.layers),
            )
            for group in self.groups
        ]
        sizes = {layer.digest: layer.size_bytes for layer in self.layers}
        return PlanInfo(
            groups=groups,
            layers=[layer.digest for layer in self.layers],
            size_bytes=sum(sizes.values()),
            workdir=self.workdir,
            user=self.user,
            env=list(self.env),
        )


def check_roles(groups: Sequence[ResolvedGroup], role: Role) -> None:
    """Refuses, by name, what an execution environment must not see. Raises EnvletError(ROLE_REFUSED)."""
    for group in groups:
        if role == "execution" and group.role == "evaluator":
            raise EnvletError(
                errors.ROLE_REFUSED,
                f"{group.reference} has the role evaluator and the plan has the role execution; leave the group out, or ask "
                "for the role evaluation",
            )


class Plans:
    """Resolves references. One owner: the daemon."""

    def __init__(
        self,
        resolver: Resolver,
        refs_path: Path,
        translate: Callable[[Exception, str], EnvletError | None],
        max_references: int = 4096,
        patience_s: float = 3.0,
    ) -> None:
        """`patience_s`: how long the registry is waited for when the reference is known, before what is known serves."""
        self._patience_s = patience_s
        self._threads = trio.CapacityLimiter(RESOLVED_AT_ONCE)
        self._resolver = resolver
        self._refs_path = refs_path
        self._translate = translate
        self._max_references = max_references
        self._known: OrderedDict[str, ResolvedGroup] = OrderedDict()
        self._in_flight: dict[str, _Flight] = {}
        self._save_lock = trio.Lock()
        self._dirty = False
        self._counts = {"resolved": 0, "from_cache": 0, "shared": 0, "registry_away": 0, "evicted": 0}
        self._load()

    def _load(self) -> None:
        """What an earlier daemon knew. A file that cannot be read is only a cache that is empty."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
            stored = msgspec.json.decode(self._refs_path.read_bytes(), type=dict[str, ResolvedGroup])
            self._known.update(list(stored.items())[-self._max_references :])

    def statistics(self) -> dict[str, int]:
        """Counters, and how many references are known."""
        return {**self._counts, "known": len(self._known), "known_max": self._max_references}

    async def resolve(self, references: Sequence[str], role: Role) -> Plan:
        """The plan of these references, base first. Raises EnvletError."""
        found: dict[str, ResolvedGroup] = {}

        async def one(reference: str) -> None:
            found[reference] = await self._resolve_group(reference)

        wanted = list(dict.fromkeys(references))
        try:
            async with trio.open_nursery() as nursery:
                for reference in wanted[1:]:
                    nursery.start_soon(one, reference)
                await one(wanted[0])
        except BaseExceptionGroup as group:
            first = first_error(group)
            if first is None:
                raise
            raise first from None
        plan = Plan(tuple(found[reference] for reference in references))
        check_roles(plan.groups, role)
        await self._save()
        return plan

    async def _resolve_group(self, reference: str) -> ResolvedGroup:
        known = self._known.get(reference)
        if known is not None and "@sha256:" in reference:
            self._known.move_to_end(reference)
            self._counts["from_cache"] += 1
            return known
        flight = self._in_flight.get(reference)
        if flight is None or flight.abandoned:
            flight = self._in_flight[reference] = _Flight()
            try:
                flight.outcome = await self._ask(reference, known)
            except EnvletError as error:
                flight.outcome = error
            finally:
                flight.abandoned = flight.outcome is None
                if self._in_flight.get(reference) is flight:
                    del self._in_flight[reference]
                flight.landed.set()
        else:
            self._counts["shared"] += 1
            await flight.landed.wait()
        if flight.outcome is None:  # who asked was cancelled: ask again
            return await self._resolve_group(reference)
        if isinstance(flight.outcome, EnvletError):
            raise EnvletError(flight.outcome.code, flight.outcome.message, flight.outcome.data)
        return flight.outcome

    async def _ask(self, reference: str, known: ResolvedGroup | None) -> ResolvedGroup:
        group: ResolvedGroup | None = None
        try:
            with trio.move_on_after(math.inf if known is None else self._patience_s):
                group = await trio.to_thread.run_sync(
                    partial(self._resolver.resolve, reference), abandon_on_cancel=True, limiter=self._threads
                )
        except Exception as error:
            failure = error if isinstance(error, EnvletError) else self._translate(error, reference)
            if failure is None:
                raise
            if failure.code is errors.REGISTRY_UNAVAILABLE and known is not None:
                self._counts["registry_away"] += 1
                return known
            raise failure from error
        if group is None:
            assert known is not None
            self._counts["registry_away"] += 1
            return known
        self._counts["resolved"] += 1
        if known != group:
            self._known[reference] = group
            self._dirty = True
        self._known.move_to_end(reference)
        while len(self._known) > self._max_references:
            self._known.popitem(last=False)
            self._counts["evicted"] += 1
        return group

    async def _save(self) -> None:
        """Writes refs.json if it changed, whole or not at all."""
        async with self._save_lock:
            if not self._dirty:
                return
            self._dirty = False
            data = msgspec.json.encode(dict(self._known))
            await trio.to_thread.run_sync(_replace_file, self._refs_path, data)


@attrs.define(eq=False)
class _Flight:
    """One request to the resolver that several callers may wait for."""

    landed: trio.Event = attrs.field(factory=trio.Event)
    outcome: ResolvedGroup | EnvletError | None = None
    abandoned: bool = False


def _replace_file(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(data)
    temporary.replace(path)
