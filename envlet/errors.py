"""The one registry of error codes: number, name, whether a retry can help, and meaning. The documents are generated
from it.

Numbers below zero are JSON-RPC's own; ours start at 1000 and are never used again for another meaning.
"""

from typing import Any

import attrs


@attrs.frozen
class ErrorCode:
    """One kind of failure that a client can tell apart."""

    number: int
    name: str
    retryable: bool
    """The same request can succeed later without anybody changing anything."""
    meaning: str


PARSE_ERROR = ErrorCode(-32700, "parse_error", False, "The line is not JSON.")
INVALID_REQUEST = ErrorCode(-32600, "invalid_request", False, "The line is JSON but not a JSON-RPC 2.0 request; batches are refused.")
METHOD_NOT_FOUND = ErrorCode(-32601, "method_not_found", False, "There is no such method.")
INVALID_PARAMS = ErrorCode(-32602, "invalid_params", False, "The parameters do not have the type of the method.")
INTERNAL_ERROR = ErrorCode(-32603, "internal_error", False, "A defect of the daemon; its log has the traceback.")

NOT_FOUND = ErrorCode(1000, "not_found", False, "No environment has this id.")
EXISTS = ErrorCode(1001, "exists", False, "An environment with the requested id exists already.")
WRONG_STATE = ErrorCode(1002, "wrong_state", False, "The environment cannot do this in its state; `data` has the state and its cause.")
ROLE_REFUSED = ErrorCode(1003, "role_refused", False, "A group of role evaluator in an execution plan.")
REFERENCE_NOT_FOUND = ErrorCode(1004, "reference_not_found", False, "The registry does not have this layer group.")
REGISTRY_UNAVAILABLE = ErrorCode(
    1005, "registry_unavailable", True, "The registry could not be reached and nothing is known of the reference."
)
AUTHENTICATION = ErrorCode(1006, "authentication", False, "The registry refused the credentials.")
INTEGRITY = ErrorCode(1007, "integrity", False, "Bytes did not have the digest that was promised for them.")
CAPACITY = ErrorCode(1008, "capacity", True, "The node has no room: for another environment, or in its cache for what is to be prefetched.")
MOUNT_FAILED = ErrorCode(1009, "mount_failed", False, "The plan or the environment's root could not be mounted.")
RUNTIME_FAILED = ErrorCode(1010, "runtime_failed", False, "The OCI runtime failed; its message is part of the error.")
INIT_FAILED = ErrorCode(1011, "init_failed", False, "An init command failed; `data` has the command, its status and the end of its output.")
APPLY_REFUSED = ErrorCode(
    1012, "apply_refused", False, "The diff to apply has an entry that cannot be applied safely; the message names it."
)
DIFF_FAILED = ErrorCode(1013, "diff_failed", False, "The upper directory cannot be said as a tar; the message names the entry.")
ENDED = ErrorCode(1014, "ended", False, "The environment ended while the request ran; `data` has the state and its cause.")
CLEANUP_FAILED = ErrorCode(
    1015, "cleanup_failed", True, "Something of the environment is left; the message names what, and `env.delete` tries again."
)
SHUTTING_DOWN = ErrorCode(1016, "shutting_down", True, "The daemon is ending.")
DESCRIPTORS = ErrorCode(1017, "descriptors", False, "The descriptors that came with the request are not those that the method takes.")
TIMEOUT = ErrorCode(1018, "timeout", False, "The init commands took longer than `init_timeout_s`.")
PERMISSION = ErrorCode(1019, "permission", False, "The caller may not use the socket.")
NETWORK_REFUSED = ErrorCode(1020, "network_refused", False, "The node does not let environments use its network.")
BUSY = ErrorCode(1021, "busy", True, "Requests still run that the daemon would have to cut short; wait, or force it.")
PREFETCH_FAILED = ErrorCode(1022, "prefetch_failed", False, "Not all that is to be prefetched could be had; `data` has the layers.")

ALL_CODES: tuple[ErrorCode, ...] = tuple(value for value in list(globals().values()) if isinstance(value, ErrorCode))
BY_NUMBER: dict[int, ErrorCode] = {code.number: code for code in ALL_CODES}
BY_NAME: dict[str, ErrorCode] = {code.name: code for code in ALL_CODES}


class EnvletError(Exception):
    """A failure with a code of the registry. The message says what was expected, what came, and what to do."""

    def __init__(self, code: ErrorCode, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data or {}

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class ConnectionLost(Exception):
    """The other end of the socket went away before it answered."""
