"""JSON-RPC 2.0, one message a line: bytes in, messages out. Nothing here touches a socket.

A line is bounded, so that a client that never sends a newline cannot fill the memory. Batches are refused: requests
of one connection run concurrently anyway, and a batch would only delay the answers to the slowest. A notification (a
request without id) is refused too, because every method of ours answers.
"""

from typing import Annotated, Any

import attrs
import msgspec

from envlet import errors
from envlet.errors import EnvletError, ErrorCode

LINE_MAX_BYTES = 16 << 20
RequestId = int | str


class LineDecoder:
    """Cuts a byte stream into lines. Lines are without their newline; empty ones are left out.

    Raises EnvletError(INVALID_REQUEST) once a line is longer than `max_bytes`; the stream cannot be used after that.
    """

    def __init__(self, max_bytes: int = LINE_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._pending_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *complete, rest = data.split(b"\n")
        lines: list[bytes] = []
        for piece in complete:
            self._append(piece)
            line = b"".join(self._pieces)
            self._pieces.clear()
            self._pending_bytes = 0
            if line.strip():
                lines.append(line)
        self._append(rest)
        return lines

    def _append(self, piece: bytes) -> None:
        self._pending_bytes += len(piece)
        if self._pending_bytes > self._max_bytes:
            raise EnvletError(
                errors.INVALID_REQUEST,
                f"a line of more than {self._max_bytes} bytes; send large data through a descriptor",
            )
        if piece:
            self._pieces.append(piece)


@attrs.frozen
class Call:
    """A request as it came, its parameters not yet checked."""

    request_id: RequestId
    method: str
    params: msgspec.Raw


class _WireRequest(msgspec.Struct):
    jsonrpc: str
    method: str
    id: RequestId
    params: msgspec.Raw = msgspec.Raw(b"{}")


class _WireError(msgspec.Struct):
    code: int
    message: str
    data: dict[str, Any] = {}


class _WireAnswer(msgspec.Struct):
    jsonrpc: str = "2.0"
    id: RequestId | None = None
    method: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"")
    result: msgspec.Raw = msgspec.Raw(b"")
    error: _WireError | None = None


@attrs.frozen
class Answer:
    """What a client receives: a result, an error, or (with `method`) a notification."""

    request_id: RequestId | None
    method: str | None
    payload: msgspec.Raw
    error: EnvletError | None


_request_decoder = msgspec.json.Decoder(_WireRequest)
_answer_decoder = msgspec.json.Decoder(_WireAnswer)
_encoder = msgspec.json.Encoder()


def decode_request(line: bytes) -> Call:
    """One line from a client. Raises EnvletError(PARSE_ERROR or INVALID_REQUEST); see `request_id_of` for what to
    answer.
    """
    if line.lstrip()[:1] == b"[":
        raise EnvletError(errors.INVALID_REQUEST, "a batch; send its requests one a line, they run concurrently")
    try:
        wire = _request_decoder.decode(line)
    except msgspec.ValidationError as error:
        raise EnvletError(errors.INVALID_REQUEST, f"{error}; a request has jsonrpc, id, method and params") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EnvletError(errors.PARSE_ERROR, f"{error}; one JSON object a line is expected") from error
    if wire.jsonrpc != "2.0":
        raise EnvletError(errors.INVALID_REQUEST, f"jsonrpc is {wire.jsonrpc!r}; this is a JSON-RPC 2.0 service")
    return Call(wire.id, wire.method, wire.params)


def request_id_of(line: bytes) -> RequestId | None:
    """The id of a request that `decode_request` refused, if it has a usable one."""

    class OnlyId(msgspec.Struct):
        id: RequestId | None = None

    try:
        return msgspec.json.decode(line, type=OnlyId).id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@attrs.frozen
class SaidDescriptors:
    """What a request says of its descriptors, checked or not. `count` is None where it says nothing."""

    method: str
    count: int | None


def descriptors_of(line: bytes) -> SaidDescriptors | None:
    """The count of descriptors in a request that was refused; None where it cannot be read."""

    class OnlyParams(msgspec.Struct):
        descriptors: Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType = msgspec.UNSET

    class OnlyDescriptors(msgspec.Struct):
        method: str = ""
        params: OnlyParams = msgspec.field(default_factory=OnlyParams)

    try:
        said = msgspec.json.decode(line, type=OnlyDescriptors)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    count = said.params.descriptors
    return SaidDescriptors(said.method, None if count is msgspec.UNSET else count)


def encode_request(request_id: RequestId, method: str, params: object) -> bytes:
    return _encoder.encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}) + b"\n"


def encode_result(request_id: RequestId, result: object) -> bytes:
    return _encoder.encode({"jsonrpc": "2.0", "id": request_id, "result": result}) + b"\n"


def encode_notification(method: str, params: object) -> bytes:
    return _encoder.encode({"jsonrpc": "2.0", "method": method, "params": params}) + b"\n"


def encode_error(request_id: RequestId | None, error: EnvletError) -> bytes:
    code: ErrorCode = error.code
    data = {**error.data, "name": code.name, "retryable": code.retryable}
    body = {"code": code.number, "message": error.message, "data": data}
    return _encoder.encode({"jsonrpc": "2.0", "id": request_id, "error": body}) + b"\n"


def decode_answer(line: bytes) -> Answer:
    """One line from the daemon. Raises EnvletError(PARSE_ERROR) if it is none."""
    try:
        wire = _answer_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise EnvletError(errors.PARSE_ERROR, f"the daemon sent a line that is no answer: {problem}") from problem
    failure = None
    if wire.error is not None:
        code = errors.BY_NUMBER.get(wire.error.code, errors.INTERNAL_ERROR)
        failure = EnvletError(code, wire.error.message, wire.error.data)
    return Answer(wire.id, wire.method, wire.params if wire.method is not None else wire.result, failure)
