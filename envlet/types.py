"""The requests and results of the API: the one source of what goes over the socket, of its checks and of `docs/api.md`.

A field's `description` is what the document says about it. Bytes travel as base64. A request that moves descriptors
says how many in `descriptors`; they come with the message, in order (SCM_RIGHTS).
"""

from typing import Annotated, Any, Literal

import attrs
import msgspec
from msgspec import Meta

CPU_MAX = 4096
CPU_MIN = 0.02
"""Cores. The kernel takes no quota below 1 ms, and periods are 50 ms: less would not be what is set."""

Role = Literal["execution", "evaluation"]
Network = Literal["none", "host"]
State = Literal["creating", "ready", "deleting", "deleted", "faulted", "oom", "lost", "killed", "expired", "error"]

EnvironmentId = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,62}\Z", description="Letters, digits and dashes, 63 at most.")]
Reference = Annotated[str, Meta(min_length=1, max_length=1024, description="`oci:DIR:TAG` or `HOST[:PORT]/REPO[:TAG][@DIGEST]`.")]
NoNul = Annotated[str, Meta(pattern=r"\A[^\x00]*\Z", max_length=131000)]
AbsolutePath = Annotated[str, Meta(pattern=r"\A/[^\x00]*\Z", max_length=4095, description="An absolute path.")]
VariableName = Annotated[str, Meta(pattern=r"\A[^=\x00]+\Z", max_length=4096)]
Variables = Annotated[dict[VariableName, NoNul], Meta(max_length=4096)]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all requests: an unknown field is an error, so that a mistyped limit is not silently none."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all results. Clients must ignore fields that they do not know."""


class CreateRequest(Request, frozen=True, kw_only=True):
    groups: Annotated[list[Reference], Meta(min_length=1, max_length=64, description="Layer groups, base first.")]
    role: Annotated[Role, Meta(description="An `execution` plan refuses groups of role evaluator.")] = "execution"
    init: Annotated[
        list[NoNul],
        Meta(max_length=256, description="Shell commands, run in order by root in the working directory; one that fails ends all."),
    ] = []
    init_timeout_s: Annotated[float, Meta(gt=0, le=86400, description="For all init commands together.")] = 600.0
    descriptors: Annotated[int, Meta(ge=0, le=1, description="1: a diff (tar) to apply before the start.")] = 0
    cpu: Annotated[Annotated[float, Meta(ge=CPU_MIN, le=CPU_MAX)] | None, Meta(description="Cores; null: the node's default.")] = None
    memory_bytes: Annotated[Annotated[int, Meta(ge=4 << 20)] | None, Meta(description="null: the node's default.")] = None
    pids: Annotated[Annotated[int, Meta(ge=4, le=4194304)] | None, Meta(description="Processes and threads; null: the node's default.")] = (
        None
    )
    ttl_s: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="After this the environment ends as `expired`; null: never.")
    ] = None
    env: Annotated[Variables, Meta(description="Goes over the groups' variables.")] = {}
    workdir: Annotated[AbsolutePath | None, Meta(description="null: of the topmost group that has one, else `/`.")] = None
    id: Annotated[EnvironmentId | None, Meta(description="null: the node chooses.")] = None
    network: Annotated[
        Network,
        Meta(description="`none`: loopback alone. `host`: the node's own, where its configuration has `host_network`."),
    ] = "none"
    labels: Annotated[dict[str, str], Meta(max_length=64, description="Kept and given back, without meaning here.")] = {}


class Timings(Result, frozen=True, kw_only=True):
    """Seconds of each part of a creation."""

    resolve_s: Annotated[float, Meta(description="References to digests.")] = 0.0
    mount_s: Annotated[float, Meta(description="Plan into the data plane, overlay mounted.")] = 0.0
    queue_s: Annotated[float, Meta(description="Waiting for a place among those that start.")] = 0.0
    apply_s: Annotated[float, Meta(description="The diff into the upper directory.")] = 0.0
    runtime_s: Annotated[float, Meta(description="Control group and OCI runtime.")] = 0.0
    mutation_s: Annotated[float, Meta(description="The init commands.")] = 0.0
    total_s: Annotated[float, Meta(description="From the request to `ready`.")] = 0.0


class InitResult(Result, frozen=True, kw_only=True):
    """One init command that ran."""

    exit_code: Annotated[int, Meta(description="128 + n for signal n.")]
    wall_s: float
    output_tail: Annotated[str, Meta(description="The last 16 KiB of its output, both streams.")]


class Limits(Result, frozen=True, kw_only=True):
    """The fixed quota of an environment."""

    cpu: float
    memory_bytes: int
    pids: int


class EnvironmentInfo(Result, frozen=True, kw_only=True):
    """An environment as it is now."""

    id: str
    state: State
    cause: Annotated[str | None, Meta(description="Why it is in a state of failure.")] = None
    role: Role = "execution"
    groups: Annotated[list[str], Meta(description="`REF@sha256:…`, base first.")] = []
    plan_id: str | None = None
    content_bytes: Annotated[int, Meta(description="Of all files of the plan.")] = 0
    workdir: str = "/"
    limits: Limits | None = None
    labels: dict[str, str] = {}
    created_unix_s: float = 0.0
    expires_unix_s: float | None = None
    timings: Timings = Timings()
    init: list[InitResult] = []
    usage: Annotated[
        dict[str, int], Meta(description="cpu_us, memory_bytes, memory_peak_bytes, pids, oom_kills; empty when it has ended.")
    ] = {}


class ExecRequest(Request, frozen=True, kw_only=True):
    id: EnvironmentId
    argv: Annotated[list[NoNul], Meta(min_length=1, max_length=4096)]
    workdir: Annotated[AbsolutePath | None, Meta(description="null: the environment's.")] = None
    env: Annotated[Variables, Meta(description="Goes over the environment's variables.")] = {}
    user: Annotated[NoNul | None, Meta(description="`USER[:GROUP]`, names or numbers; null: of the groups, else root.")] = None
    timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="After this the command and all its descendants are killed.")
    ] = None
    tty: Annotated[bool, Meta(description="A terminal: its master comes with the notification `exec.terminal` before the result.")] = False
    descriptors: Annotated[
        int,
        Meta(ge=0, le=3, description="stdin, stdout, stderr, as many as given. The rest: stdin is empty, outputs are captured."),
    ] = 0
    output_limit_bytes: Annotated[int, Meta(ge=0, le=4 << 20, description="Of each captured output: its head and its tail are kept.")] = (
        1 << 20
    )


class ExecResult(Result, frozen=True, kw_only=True):
    exit_code: Annotated[int, Meta(description="128 + n for signal n; 127 not found, 126 cannot be executed.")]
    timed_out: bool
    wall_s: float
    failure: Annotated[str | None, Meta(description="Why the command could not be executed (126 and 127 only).")] = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_omitted_bytes: Annotated[int, Meta(description="Left out between head and tail.")] = 0
    stderr_omitted_bytes: int = 0


class TerminalNotification(Result, frozen=True, kw_only=True):
    """`exec.terminal`: its message carries one descriptor, the master of the terminal."""

    request_id: Annotated[int | str, Meta(description="The `id` of the `env.exec` request.")]


class GetRequest(Request, frozen=True, kw_only=True):
    id: EnvironmentId


class ListRequest(Request, frozen=True, kw_only=True):
    all: Annotated[bool, Meta(description="Also those that are deleted and still remembered.")] = False


class ListResult(Result, frozen=True, kw_only=True):
    environments: list[EnvironmentInfo]


class DiffRequest(Request, frozen=True, kw_only=True):
    id: EnvironmentId
    descriptors: Annotated[Literal[1], Meta(description="The descriptor that the tar is written to.")] = 1


class DiffResult(Result, frozen=True, kw_only=True):
    entries: int
    whiteouts: Annotated[int, Meta(description="Of them: removed entries and opaque directories.")]
    content_bytes: Annotated[int, Meta(description="Of the regular files.")]
    devices: Annotated[list[str], Meta(description="The first 5 device nodes in it: `env.create` refuses to apply a diff with one.")] = []
    device_count: Annotated[int, Meta(description="How many device nodes there are.")] = 0


class DeleteRequest(Request, frozen=True, kw_only=True):
    id: EnvironmentId


class DeleteResult(Result, frozen=True, kw_only=True):
    id: str
    wall_s: float


class ResolveRequest(Request, frozen=True, kw_only=True):
    groups: Annotated[list[Reference], Meta(min_length=1, max_length=64, description="Layer groups, base first.")]
    role: Role = "execution"


class GroupInfo(Result, frozen=True, kw_only=True):
    reference: Annotated[str, Meta(description="`REF@sha256:…`.")]
    digest: str
    role: str | None
    layers: Annotated[list[str], Meta(description="Digests, base first.")]
    size_bytes: Annotated[int, Meta(description="Of its blobs.")]


class PlanInfo(Result, frozen=True, kw_only=True):
    groups: list[GroupInfo]
    layers: Annotated[list[str], Meta(description="Digests of the whole plan, base first.")]
    size_bytes: Annotated[int, Meta(description="Of the blobs; one that occurs twice counts once.")]
    workdir: str
    user: str | None
    env: list[str]


PrefetchWhat = Literal["auto", "profile", "all"]


class PrefetchRequest(Request, frozen=True, kw_only=True):
    groups: Annotated[list[Reference], Meta(min_length=1, max_length=64, description="Layer groups, of any role.")]
    what: Annotated[
        PrefetchWhat,
        Meta(
            description="Of each layer: what its profile names, or all of it where there is none (`auto`); only what profiles name; all."
        ),
    ] = "auto"
    progress: Annotated[bool, Meta(description="Whether `plan.progress` shall come, about twice a second.")] = False


class PrefetchedLayer(Result, frozen=True, kw_only=True):
    """A layer, and what of it is in the cache. Bytes are uncompressed."""

    digest: str
    source: str
    by: Annotated[str, Meta(description="What was wanted of it: what its `profile` names, or `all`.")]
    wanted_bytes: int
    done_bytes: Annotated[int, Meta(description="Of them, in the cache.")]
    failure: Annotated[str, Meta(description="Why not all of them are; empty in a result, which is given when all are.")] = ""


class PrefetchResult(Result, frozen=True, kw_only=True):
    wanted_bytes: int
    done_bytes: int
    layers: list[PrefetchedLayer]


class ProgressNotification(Result, frozen=True, kw_only=True):
    """`plan.progress`."""

    request_id: Annotated[int | str, Meta(description="The `id` of the `plan.prefetch` request.")]
    wanted_bytes: Annotated[int, Meta(description="Uncompressed. It grows while layers are opened.")]
    done_bytes: Annotated[int, Meta(description="Of them, in the cache.")]


class InfoRequest(Request, frozen=True, kw_only=True):
    pass


class NodeInfo(Result, frozen=True, kw_only=True):
    version: str
    instance: Annotated[str, Meta(description="Of this start of the daemon: another one after a restart.")]
    pid: int
    started_unix_s: float
    runtime: Annotated[str, Meta(description="Name and version of the OCI runtime.")]
    cgroups: Annotated[str, Meta(description="v1, v2 or hybrid.")]
    view: Annotated[str, Meta(description="How roots are shown: kernel or merged (docs/views.md).")]
    view_reason: Annotated[str, Meta(description="Why that one.")]
    environments: Annotated[dict[str, int], Meta(description="How many, by state.")]
    environments_max: int
    starting_max: int
    statistics: Annotated[dict[str, Any], Meta(description="Counters of the daemon; `data_plane` has those of weefs (docs/metrics.md).")]


class CollectRequest(Request, frozen=True, kw_only=True):
    target_bytes: Annotated[int, Meta(ge=0, description="The cache shall take at most this much; 0: as little as can be.")] = 0
    dry_run: Annotated[bool, Meta(description="Says what would be removed, and removes nothing.")] = False


class CollectedLayer(Result, frozen=True, kw_only=True):
    """A layer that was removed from the cache."""

    digest: str
    source: str
    disk_bytes: int
    used_unix_s: Annotated[float, Meta(description="When it was last put into a plan.")]


class CollectResult(Result, frozen=True, kw_only=True):
    layers: Annotated[list[CollectedLayer], Meta(description="In the order of their removal.")]


class VerifyRequest(Request, frozen=True, kw_only=True):
    digest: Annotated[str | None, Meta(description="Of one layer; null: all.")] = None


class CheckedLayer(Result, frozen=True, kw_only=True):
    """A layer whose chunks in the cache were compared with their digests."""

    digest: str
    good: Annotated[int, Meta(description="Chunks that had theirs.")]
    damaged: Annotated[int, Meta(description="Chunks that had not. They are fetched again when they are read.")]


class VerifyResult(Result, frozen=True, kw_only=True):
    layers: list[CheckedLayer]


class DoctorRequest(Request, frozen=True, kw_only=True):
    pass


class CheckResult(Result, frozen=True, kw_only=True):
    """Something that was tried."""

    name: str
    ok: bool
    detail: Annotated[str, Meta(description="How it went, and what to do if it did not go well.")]
    took_s: float = 0.0


class DoctorResult(Result, frozen=True, kw_only=True):
    checks: list[CheckResult]


class RestartRequest(Request, frozen=True, kw_only=True):
    drain_s: Annotated[
        float, Meta(ge=0, le=86400, description="How long to wait for requests that run; new ones are refused meanwhile.")
    ] = 30.0
    force: Annotated[bool, Meta(description="Cut short what still runs then, instead of answering `busy`.")] = False


class RestartResult(Result, frozen=True, kw_only=True):
    cut_short: Annotated[int, Meta(description="Requests that did not end in time.")]


@attrs.frozen
class Method:
    """One method of the API."""

    name: str
    request: type[Request]
    result: type[Result]
    summary: str


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "env.create", CreateRequest, EnvironmentInfo,
            "Makes an environment from layer groups and answers when it is `ready`. All or nothing: after an error, or when the client "
            "goes away before the answer, nothing of it is left.",
        ),
        Method(
            "env.exec", ExecRequest, ExecResult,
            "Runs one command in a ready environment. Background processes that it leaves go on; a timeout, or a client that goes away, "
            "kills the command and everything that descends from it.",
        ),
        Method("env.get", GetRequest, EnvironmentInfo, "One environment, also one that has ended and is still remembered."),
        Method("env.list", ListRequest, ListResult, "The environments, in the order of their creation."),
        Method(
            "env.diff", DiffRequest, DiffResult,
            "Writes what the environment changed as an OCI layer tar to the descriptor. The environment stands still meanwhile, so "
            "the tar is of one moment. Sockets are left out. Works in the failure states too, except `expired` and `lost`.",
        ),
        Method(
            "env.delete", DeleteRequest, DeleteResult,
            "Kills all processes, unmounts, removes; answers when nothing is left.",
        ),
        Method("plan.resolve", ResolveRequest, PlanInfo, "References to digests, without making anything."),
        Method(
            "plan.prefetch", PrefetchRequest, PrefetchResult,
            "Brings layer groups into the node's cache before any environment wants them: references, metadata and contents, so that they "
            "start without the registry. Behind readers; what is in use or pinned is not evicted for it. What could not be had is an "
            "error, whose `data` has the `layers`; what came stays. A client that goes away ends it, and the same request goes on with it.",
        ),
        Method(
            "cache.gc", CollectRequest, CollectResult,
            "Removes layers from the cache that no plan has and that are not pinned, those first that were unused for longest.",
        ),
        Method(
            "cache.verify", VerifyRequest, VerifyResult,
            "Reads what is in the cache, compares it with its digests, and drops what is damaged. Takes as long as reading it does.",
        ),
        Method("node.info", InfoRequest, NodeInfo, "The node and its figures."),
        Method(
            "node.doctor", DoctorRequest, DoctorResult,
            "Looks for what is wrong by doing what the node does: a range is fetched from each source that the cache has layers of, "
            "and a chunk from each peer.",
        ),
        Method(
            "node.restart", RestartRequest, RestartResult,
            "Starts the daemon and the data plane anew, from what is installed now, under the environments: they notice a pause in reads "
            "that must fetch, and nothing else. The daemon keeps its pid and its socket; the connection closes after the answer, and the "
            "next one is served by the new daemon.",
        ),
    )
}  # fmt: skip
