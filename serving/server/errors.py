"""Every way in which a request can fail, and what HTTP and gRPC call it. No JAX."""

import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shiftjax.options import printable


class Kind(NamedTuple):
    """One row of the error map. `retry_seconds`: the same request may succeed after that."""

    status: int  # of HTTP
    type: str  # in the error object, as OpenAI's clients know it
    grpc: str  # the name of a gRPC status code
    code: str  # in the error object and in ErrorInfo, unless the error brings its own
    retry_seconds: int | None = None


_INVALID = "invalid_request_error"
MAX_MESSAGE = 500  # characters; a gRPC status travels in headers of 8 KiB

KINDS: Mapping[str, Kind] = types.MappingProxyType(
    {
        "invalid": Kind(400, _INVALID, "INVALID_ARGUMENT", "invalid_value"),
        "unauthenticated": Kind(401, "authentication_error", "UNAUTHENTICATED", "invalid_api_key"),
        "forbidden": Kind(403, "permission_error", "PERMISSION_DENIED", "not_allowed"),
        "not_found": Kind(404, "not_found_error", "NOT_FOUND", "not_found"),
        "no_method": Kind(405, _INVALID, "UNIMPLEMENTED", "method_not_allowed"),
        "slow_sender": Kind(408, "timeout_error", "DEADLINE_EXCEEDED", "request_timeout"),
        "duplicate": Kind(409, _INVALID, "ALREADY_EXISTS", "duplicate_request_id"),
        "not_now": Kind(409, _INVALID, "FAILED_PRECONDITION", "failed_precondition"),
        "aborted": Kind(409, "aborted_error", "ABORTED", "aborted"),
        "too_large": Kind(413, _INVALID, "RESOURCE_EXHAUSTED", "request_too_large"),
        "media_type": Kind(415, _INVALID, "INVALID_ARGUMENT", "unsupported_media_type"),
        "constraint": Kind(422, _INVALID, "FAILED_PRECONDITION", "constraint_failed"),
        "queue_full": Kind(429, "rate_limit_error", "RESOURCE_EXHAUSTED", "queue_full", 1),
        "quota": Kind(429, "rate_limit_error", "RESOURCE_EXHAUSTED", "quota_exceeded", 1),
        "headers": Kind(431, _INVALID, "RESOURCE_EXHAUSTED", "headers_too_large"),
        "cancelled": Kind(499, "cancelled_error", "CANCELLED", "cancelled"),
        "slow_reader": Kind(499, "timeout_error", "CANCELLED", "slow_reader"),
        "internal": Kind(500, "server_error", "INTERNAL", "internal_error"),
        "device_memory": Kind(503, "server_error", "RESOURCE_EXHAUSTED", "device_oom", 5),
        "busy": Kind(503, "service_unavailable", "UNAVAILABLE", "server_busy", 1),
        "starting": Kind(503, "service_unavailable", "UNAVAILABLE", "server_starting", 5),
        "restarting": Kind(503, "service_unavailable", "UNAVAILABLE", "engine_restarting", 5),
        "draining": Kind(503, "service_unavailable", "UNAVAILABLE", "server_draining", 5),
        "deadline": Kind(504, "timeout_error", "DEADLINE_EXCEEDED", "deadline_exceeded"),
    }
)


class Violation(NamedTuple):
    """A field that is wrong, and how."""

    field: str
    description: str


class ServeError(Exception):
    """A request that fails, in words for its sender: no path, no address, no traceback.

    `code` is for clients; `cause` is the engine's code of the same, for counting, and stays inside.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        violations: Sequence[Violation] = (),
        cause: str | None = None,
    ):
        self.message = _shown(message)
        super().__init__(self.message)
        self.kind_name = kind
        self.kind = KINDS[kind]
        self.violations = tuple(Violation(*map(_shown, each)) for each in violations)
        self.param = param or (self.violations[0].field if self.violations else None)
        self.code = code or self.kind.code
        self.cause = cause

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object of OpenAI's interface."""
        fields = {"message": self.message, "type": self.kind.type}
        return {"error": {**fields, "param": self.param, "code": self.code}}


def _shown(text: str) -> str:
    """A text that may hold what the client sent: one printable line of bounded length."""
    line = printable(text[:MAX_MESSAGE])
    is_whole = len(text) <= MAX_MESSAGE and len(line) <= MAX_MESSAGE
    return line if is_whole else f"{line[: MAX_MESSAGE - 4]} ..."


def invalid(field: str, description: str, code: str | None = None) -> ServeError:
    """The error for one field that is wrong; the message is `field description`."""
    message = f"{field} {description}"
    return ServeError("invalid", message, code=code, violations=[Violation(field, description)])


def unknown_model() -> ServeError:
    """The error for the name of a model, or of an adapter, that is not there."""
    message = "There is no such model; see /v1/models."
    return ServeError("not_found", message, param="model", code="model_not_found")


def internal_error() -> ServeError:
    """What the outside hears of a bug."""
    return ServeError("internal", "The server failed to process this request.")
