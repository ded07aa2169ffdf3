"""What the host tier has done and holds, over all groups. No JAX."""

from collections.abc import Iterator
from dataclasses import dataclass

from shiftjax.metric import Metric, counter, gauge


@dataclass(frozen=True)
class HostStats:
    """Counters since the start, and the bytes of now."""

    num_query_tokens: int  # of prompts, looked up because the device did not have them
    num_hit_tokens: int
    num_offloaded_bytes: int
    num_restored_bytes: int
    num_used_bytes: int
    num_bytes: int  # the budget
    num_prefetches: int = 0  # extents brought to devices before a sequence was admitted
    num_prefetch_hits: int = 0  # of them, those that its admission then used

    def __add__(self, other: "HostStats") -> "HostStats":
        """Return the counters of two groups together; the bytes are of the memory they share."""
        return HostStats(
            self.num_query_tokens + other.num_query_tokens,
            self.num_hit_tokens + other.num_hit_tokens,
            self.num_offloaded_bytes + other.num_offloaded_bytes,
            self.num_restored_bytes + other.num_restored_bytes,
            self.num_used_bytes,
            self.num_bytes,
            self.num_prefetches + other.num_prefetches,
            self.num_prefetch_hits + other.num_prefetch_hits,
        )


def metrics(host: HostStats | None) -> Iterator[Metric]:
    """Tokens looked up and found in the tier, bytes moved and held; nothing without a tier."""
    if host is None:
        return
    text = "Prompt tokens looked up on the host, because the devices did not have them."
    yield counter("host_cache_queries", text, host.num_query_tokens)
    yield counter("host_cache_hits", "Of them, those found.", host.num_hit_tokens)
    moved = {("out",): host.num_offloaded_bytes, ("in",): host.num_restored_bytes}
    yield counter("host_cache_moved_bytes", "KV copied to the host and back.", moved, "direction")
    text = "Extents of KV brought to devices ahead of the admission that needs them."
    yield counter("host_cache_prefetches", text, host.num_prefetches)
    text = "Of them, those that an admission then used."
    yield counter("host_cache_prefetch_hits", text, host.num_prefetch_hits)
    yield gauge("host_cache_used_bytes", "KV on the host.", host.num_used_bytes)
    yield gauge("host_cache_size_bytes", "The budget of it.", host.num_bytes)
