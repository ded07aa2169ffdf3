"""What both front ends read from the headers of a request: its key, its id, its trace. No JAX."""

import hashlib
import hmac
import re
import uuid
from collections.abc import Collection

from serving.server.errors import invalid

REQUEST_ID = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9!#$%&()*+,./:;=?@^_{|}~\[\]-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def digests(keys: Collection[str]) -> tuple[bytes, ...]:
    """What is kept of keys: all of one length, so that comparing them tells nothing of theirs."""
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def has_key(authorization: bytes, known: Collection[bytes]) -> bool:
    """Whether a header is `Bearer KEY` with a key among these digests."""
    return key_in(authorization, known) is not None


def key_in(authorization: bytes, known: Collection[bytes]) -> bytes | None:
    """The digest of the key in a header `Bearer KEY`; None: it is none of these."""
    scheme, _, key = authorization.partition(b" ")
    given = hashlib.sha256(key.strip()).digest()
    same = [hmac.compare_digest(given, each) for each in known]  # all, always: no hint by time
    return given if scheme.lower() == b"bearer" and any(same) else None


def request_id_for(given: str) -> str:
    """The id that a client gives its request, or a new one if it gives none that can be used."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_request_id(given: str, used: str) -> None:
    """Raise `ServeError` for an id that was given and could not be used in logs and headers."""
    if given not in ("", used):
        raise invalid(REQUEST_ID, "must be 1 to 128 ASCII characters without blanks")


def trace_id(traceparent: str) -> str:
    """The trace that a W3C `traceparent` names; - if it is none."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match[1] if match else "-"
