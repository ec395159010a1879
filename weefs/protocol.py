"""What the node daemon and the data plane say to each other: one JSON object a line over a socket pair.

A request has an `id`, a `method` and its parameters; the answer repeats the id and has either a `result` or an `error`.
Events have neither. Both ends are ours and of one version, started together; the words in docs/api.md are for users,
these are not."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_LINE_BYTES = 16 << 20


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


class AddPlan(msgspec.Struct, frozen=True, tag="add_plan", tag_field="method", kw_only=True):
    """Adds the layers, base first, and their plan. Idempotent."""

    id: int
    layers: list[Layer]


class RemovePlan(msgspec.Struct, frozen=True, tag="remove_plan", tag_field="method", kw_only=True):
    id: int
    plan_id: str


class GetStatistics(msgspec.Struct, frozen=True, tag="statistics", tag_field="method", kw_only=True):
    id: int


Request = AddPlan | RemovePlan | GetStatistics


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that is served: its directory is `plan_id` below the mount."""

    plan_id: str
    entries: int
    content_bytes: int


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: not_found, authentication, integrity, capacity, unreachable, error."""

    kind: str
    message: str


class Answer(msgspec.Struct, frozen=True, tag="answer", kw_only=True, omit_defaults=True):
    id: int
    result: Any = None
    error: Error | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The first message: the mount is served."""

    pid: int


class FaultEvent(msgspec.Struct, frozen=True, tag="fault", kw_only=True):
    """A read that was answered with EIO; `pid` is the reader's, `error` says why its chunk could not be had."""

    pid: int
    layer: str
    chunk: int
    error: str


Message = Answer | Ready | FaultEvent

encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(Request).decode
decode_message = msgspec.json.Decoder(Message).decode
