"""How much one client may have open: sequences by API key and by address. No JAX."""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple
from urllib.parse import unquote

from serving.server.errors import ServeError
from serving.server.options import ServerOptions

NETWORK_BITS = 64  # of an IPv6 address: whoever has one has all of its network


class Caller(NamedTuple):
    """Who sends a request, as far as a front end knows."""

    key: bytes | None = None  # the digest of its API key
    address: str | None = None  # without port, see `holder_of`


NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=NOBODY)
"""Who sends the request that the current task serves; front ends set it."""


class Quotas:
    """Counts open sequences by caller, waiting ones included. For the event loop's thread."""

    def __init__(self, options: ServerOptions):
        self._most = options.max_seqs_per_key, options.max_seqs_per_address
        self._open: Counter[tuple[str, object]] = Counter()

    @contextmanager
    def lent(self, caller: Caller, num: int) -> Iterator[None]:
        """Count `num` sequences for a caller while the context lasts.

        Raises ServeError: quota (try again later), or invalid for more than are ever lent.
        """
        names = [*self._check(caller, num)]
        self._open.update(dict.fromkeys(names, num))
        try:
            yield
        finally:
            for name in names:
                self._open[name] -= num
                if not self._open[name]:
                    del self._open[name]

    def _check(self, caller: Caller, num: int) -> Iterator[tuple[str, object]]:
        """The names under which the caller is counted."""
        for what, who, most in zip(("key", "address"), caller, self._most, strict=True):
            if who is None or most is None:
                continue
            if num > most:
                words = f"{num} sequences in one request: this server lends {most} per {what}."
                raise ServeError("invalid", words, code="quota_exceeded")
            if (taken := self._open[what, who]) + num > most:
                words = f"This {what} has {taken} sequences open, and may have {most}."
                raise ServeError("quota", words)
            yield what, who


def holder_of(address: str | None) -> str | None:
    """What an IP address counts as: itself, or its network of `NETWORK_BITS`; None: unknown."""
    try:
        ip = ipaddress.ip_address((address or "").split("%")[0])
    except ValueError:
        return None
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, NETWORK_BITS), strict=False))


def holder_of_peer(peer: str) -> str | None:
    """The same of a gRPC peer: `ipv4:127.0.0.1:4242`, `ipv6:[::1]:4242`."""
    family, _, rest = unquote(peer).partition(":")
    return holder_of(rest.rpartition(":")[0].strip("[]")) if family in ("ipv4", "ipv6") else None
