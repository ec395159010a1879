"""What the node daemon and the data plane say to each other: one JSON object a line over a Unix stream socket.

A request has an `id`, a `method` and its parameters; the answer repeats the id and has either a `result` or an `error`.
Events have neither. The words in docs/api.md are for users, these are not.

The data plane outlives the daemon, and the other way round, so neither end may count on the other's memory:

- The daemon makes the listening socket and hands it over at the start, like the descriptors of /dev/fuse. Both keep them.
- One daemon is connected at a time; a new connection replaces the one before, whose end it proves.
- The first request of a connection is `hello`. With `descriptors`, its answer carries all that a keeper needs (SCM_RIGHTS on
  its first byte): the listening socket, the memory of requests in flight, then the descriptors of /dev/fuse.
- A fault is repeated on each connection until it is acknowledged: a failed read that nobody hears of would be a corrupted episode.
- When a connection ends, the data plane goes on. It ends when it is told to (`shutdown`), or when its mount is gone.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_LINE_BYTES = 16 << 20
VERSION = 4
"""Of this protocol. A daemon that meets another one replaces the data plane instead of talking to it."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer to serve.

    Sizes in bytes; the four `toc_*` are None when the manifest does not say: then the footer does.
    """

    digest: str
    size_bytes: int
    source: str
    toc_offset: int | None = None
    toc_size_bytes: int | None = None
    toc_raw_size_bytes: int | None = None
    toc_digest: str | None = None
    group: str | None = None
    """Digest of the manifest, in `source`, that it is wanted for: its profile may be beside it."""


class Hello(msgspec.Struct, frozen=True, tag="hello", tag_field="method", kw_only=True):
    """The first request. Its fields stay readable in every version. The answer's result is a `Welcome`."""

    id: int
    version: int = VERSION
    descriptors: bool = False
    """Whether the answer shall carry the descriptors, for a daemon that does not have them."""


class AddPlan(msgspec.Struct, frozen=True, tag="add_plan", tag_field="method", kw_only=True):
    """Adds the layers, base first, and their plan. Idempotent. The result is a `Plan`."""

    id: int
    layers: list[Layer]
    images: bool = False
    """Whether EROFS images of the plan's metadata are wanted too (the kernel view)."""
    stacked: bool = False
    """Whether these may be several, one for each layer, where a stack of them shows the plan; else it is one for the plan."""


class RemovePlan(msgspec.Struct, frozen=True, tag="remove_plan", tag_field="method", kw_only=True):
    """Idempotent: it is no error if there is no such plan."""

    id: int
    plan_id: str


class GetStatistics(msgspec.Struct, frozen=True, tag="statistics", tag_field="method", kw_only=True):
    id: int


class CollectCache(msgspec.Struct, frozen=True, tag="collect_cache", tag_field="method", kw_only=True):
    """Removes layers from the cache that are neither served nor pinned, those first that were not used for longest, until it has at most
    `target_bytes`. The result is a list of `RemovedLayer`. With `dry_run`, of those that would be removed.
    """

    id: int
    target_bytes: int = 0
    dry_run: bool = False


class VerifyCache(msgspec.Struct, frozen=True, tag="verify_cache", tag_field="method", kw_only=True):
    """Compares chunks in the cache with their digests: of one layer, or of all. Damaged ones are dropped. The result is a list of
    `VerifiedLayer`.
    """

    id: int
    digest: str | None = None


PrefetchWhat = Literal["auto", "profile", "all"]
"""Of each layer: what its profile names, or all of it where there is none; only the former; all of it."""


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch", tag_field="method", kw_only=True):
    """Brings layers into the cache, of which no plan need have any. The result is a `PrefetchProgress`, which comes within a second; as
    long as it is not done, it is to be asked for again, with the same words. What is not asked for any more ends.
    """

    id: int
    caller: str
    """Whoever asks: one word for each that is to end by itself."""
    layers: list[Layer]
    what: PrefetchWhat = "auto"


class DropPrefetch(msgspec.Struct, frozen=True, tag="drop_prefetch", tag_field="method", kw_only=True):
    """A caller's prefetch is not wanted any more. It has no answer."""

    id: int
    caller: str


class Diagnose(msgspec.Struct, frozen=True, tag="diagnose", tag_field="method", kw_only=True):
    """Looks for what is wrong, by doing what the data plane does. The result is a list of `Check`."""

    id: int


class AcknowledgeFaults(msgspec.Struct, frozen=True, tag="acknowledge_faults", tag_field="method", kw_only=True):
    """Faults up to this number need not be repeated. It has no answer."""

    id: int
    through: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", tag_field="method", kw_only=True):
    """Ends the process, after the answer."""

    id: int


Request = (
    Hello
    | AddPlan
    | RemovePlan
    | GetStatistics
    | CollectCache
    | VerifyCache
    | Prefetch
    | DropPrefetch
    | Diagnose
    | AcknowledgeFaults
    | Shutdown
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that is served: its directory is `plan_id` below the mount."""

    plan_id: str
    entries: int
    content_bytes: int
    images: list[str] = []
    """Absolute paths of EROFS images whose stack, base first, shows the plan; file contents are redirected to `objects` below the
    mount. Empty unless asked for.
    """
    images_refused: str = ""
    xattrs: bool = True
    """Whether a layer has extended attributes: only the mount that shows them is right for it then."""
    """Why there are none although they were asked for: one sentence."""


class RemovedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """`disk_bytes`: what its files took."""

    digest: str
    source: str
    disk_bytes: int
    used_unix_s: float


class VerifiedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """How many of its chunks in the cache had their digest, and how many had not and were dropped."""

    digest: str
    good: int
    damaged: int


class PrefetchedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """How far a layer is. Bytes of its stream, which is not compressed. `failure`: why nothing more of it comes; with a kind of `Error`."""

    digest: str
    source: str
    by: Literal["profile", "all"]
    wanted_bytes: int
    done_bytes: int
    failure_kind: str | None = None
    failure: str = ""


class PrefetchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of `layers`. `done`: nothing more comes."""

    done: bool
    wanted_bytes: int
    done_bytes: int
    layers: list[PrefetchedLayer]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was tried, and how it went: one sentence."""

    name: str
    ok: bool
    detail: str
    took_s: float = 0.0


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `hello`: the mount is served. When it took over from another process, `resumed` is true."""

    version: int
    pid: int
    resumed: bool
    plans: list[Plan]


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: not_found, authentication, integrity, capacity, unreachable, error."""

    kind: str
    message: str


class Answer(msgspec.Struct, frozen=True, tag="answer", kw_only=True, omit_defaults=True):
    id: int
    result: Any = None
    error: Error | None = None


class FaultEvent(msgspec.Struct, frozen=True, tag="fault", kw_only=True):
    """A read that was answered with EIO.

    It is said before the reader is answered, while its process still is one: `pid` is the reader's and `cgroup` the text of its
    /proc/PID/cgroup then (empty: the kernel itself read, or it is gone). `error` says why its chunk could not be had.
    """

    number: int
    """Counts up from 1 in the life of the mount."""
    pid: int
    cgroup: str
    layer: str
    chunk: int
    error: str


Message = Answer | FaultEvent

encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(Request).decode
decode_message = msgspec.json.Decoder(Message).decode
