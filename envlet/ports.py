"""What envlet needs of the registry and of the data plane: the two interfaces that are implemented elsewhere, and
their values.

Neither implementation is imported by the daemon: `serve` receives them. So the control plane is tested against an
unpacked directory, and the data plane without a daemon.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import trio

from envlet.types import CheckedLayer, CheckResult, CollectedLayer, PrefetchResult


@attrs.frozen
class LayerRef:
    """What the data plane must know to serve one layer."""

    digest: str
    """Of the blob, `sha256:…`."""
    size_bytes: int
    """Of the blob."""
    source: str
    """Where the blob is: `oci:/abs/dir` or `http(s)://host:port/repo`."""
    toc_offset: int | None
    toc_size_bytes: int | None
    toc_digest: str | None
    """None in the three: the manifest does not say; read the footer."""
    toc_raw_size_bytes: int | None = None
    """After decompression; None: as the frame itself says."""
    group: str | None = None
    """Digest of the manifest that it is of."""


@attrs.frozen
class ResolvedGroup:
    """A layer group as its reference resolved, once."""

    reference: str
    """As it was given, with the digest: `REF@sha256:…`."""
    digest: str
    """Of the manifest."""
    role: str | None
    """base, task, harness or evaluator: an annotation of the manifest."""
    layers: tuple[LayerRef, ...]
    """Base first."""
    env: tuple[str, ...]
    """`NAME=value`, of the image configuration, as are the next two."""
    workdir: str | None
    user: str | None


@attrs.frozen
class MountedPlan:
    """A plan that the data plane serves."""

    plan_id: str
    path: Path
    """The lower directory, valid in the daemon's mount namespace."""
    content_bytes: int
    """Of all regular files of the plan."""
    entries: int
    images: tuple[Path, ...] = ()
    """EROFS images whose stack, base first, shows the plan too (the kernel view). Empty: there are none, and `path` shows it."""
    images_refused: str = ""
    """Why there are none although they were asked for."""
    objects: Path | None = None
    """Where the contents are that the images lead to; None: in `objects` beside `path`. One place for all plans: they share pages."""


@attrs.frozen
class Fault:
    """A read that ended with EIO, because its chunk could not be had."""

    number: int
    pid: int
    """Of the reader, in the daemon's pid namespace."""
    cgroup: str
    """The text of the reader's /proc/PID/cgroup, read while it still waited; empty if it had none."""
    layer: str
    chunk: int
    error: str


class Resolver(Protocol):
    """References to layer groups."""

    def prepare(self) -> None:
        """What resolve() would do once, for the first reference. Called in a thread."""
        ...

    def resolve(self, reference: str) -> ResolvedGroup:
        """Blocks for as long as the registry takes: called in a thread. Raises the errors of `registry`."""
        ...


class DataPlane(Protocol):
    """The one FUSE mount of the node, seen from the control plane."""

    @property
    def plans(self) -> Collection[str]:
        """The plans that it served before this daemon started: those of a data plane that was taken over."""
        ...

    async def add_plan(self, layers: Sequence[LayerRef], *, images: bool = False, stacked: bool = False) -> MountedPlan:
        """Serves the layers (base first) as one tree. Idempotent; cheap for a plan that is known. `images`: with its image, if it can, or
        with those of its layers, if they may be `stacked`.
        """
        ...

    async def remove_plan(self, plan_id: str) -> None:
        """Stops serving a plan that no environment uses."""
        ...

    async def collect_cache(self, target_bytes: int, *, dry_run: bool) -> Sequence[CollectedLayer]:
        """cache.gc."""
        ...

    async def verify_cache(self, digest: str | None) -> Sequence[CheckedLayer]:
        """cache.verify."""
        ...

    async def prefetch(
        self, layers: Sequence[LayerRef], what: str, on_progress: Callable[[int, int], Awaitable[None]]
    ) -> PrefetchResult:
        """plan.prefetch, of these layers; ends when it is cancelled. `on_progress`: bytes that are wanted, and that are there. Raises
        EnvletError for what could not be had.
        """
        ...

    async def diagnose(self) -> Sequence[CheckResult]:
        """node.doctor, of the data plane."""
        ...

    async def statistics(self) -> dict[str, Any]:
        """Figures for `node.info`, as JSON can say them; `serving`: whether it gave its own. Answers in seconds, whatever happens."""
        ...

    def faults(self) -> trio.MemoryReceiveChannel[Fault]:
        """Every fault that no daemon has acknowledged. Its end is the loss of the data plane."""
        ...

    def leave(self) -> None:
        """Serves on without this daemon, for the next one."""
        ...

    async def acknowledge(self, fault: Fault) -> None:
        """This fault and all before it have had their consequence; they are not said again."""
        ...
