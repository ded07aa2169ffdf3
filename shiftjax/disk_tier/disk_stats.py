"""What the disk tier has done and holds. No JAX."""

from collections.abc import Iterator
from dataclasses import dataclass

from shiftjax.core.stats import EngineStats
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.metric import Metric, counter, gauge


@dataclass
class DiskStats:
    """Counters since the start, and the state of now."""

    num_query_tokens: int = 0  # of prompts, found there and neither on devices nor on the host
    num_hit_tokens: int = 0  # of them, those that were read and used
    num_slow_tokens: int = 0  # of them, those that were computed because reading takes longer
    num_read_bytes: int = 0
    num_written_bytes: int = 0
    num_lost_writes: int = 0  # extents that were not written: no room, too many, or writing is off
    num_bad_chunks: int = 0  # that were damaged or gone
    num_used_bytes: int = 0
    num_bytes: int = 0  # the budget
    is_writing: bool = True

    def __add__(self, other: "DiskStats") -> "DiskStats":
        """Return those of two groups together: all groups share one disk."""
        return self


def metrics(disk: DiskStats | None) -> Iterator[Metric]:
    """Tokens looked up and found in the tier, bytes moved and held; nothing without a tier."""
    if disk is None:
        return
    text = "Prompt tokens on the disk that neither devices nor the host had."
    yield counter("disk_cache_queries", text, disk.num_query_tokens)
    yield counter("disk_cache_hits", "Of them, those read and used.", disk.num_hit_tokens)
    text = "Of them, those computed because reading takes longer."
    yield counter("disk_cache_slow", text, disk.num_slow_tokens)
    moved = {("out",): disk.num_written_bytes, ("in",): disk.num_read_bytes}
    yield counter("disk_cache_moved_bytes", "KV written to files and read.", moved, "direction")
    text = "Extents of KV that were not written: no room, too many at once, or writing is off."
    yield counter("disk_cache_lost_writes", text, disk.num_lost_writes)
    text = "Files that were damaged or gone, and are not used."
    yield counter("disk_cache_bad_chunks", text, disk.num_bad_chunks)
    yield gauge("disk_cache_used_bytes", "Files of the cache.", disk.num_used_bytes)
    yield gauge("disk_cache_size_bytes", "The budget of it.", disk.num_bytes)
    yield gauge("disk_cache_writing", "Whether it is written to: 1 or 0.", int(disk.is_writing))


def hits_by_tier(stats: EngineStats) -> Iterator[Metric]:
    """Tokens of prompts by the tier that had them; nothing where there is one tier."""
    host, disk = stats.find(HostStats), stats.find(DiskStats)
    if host is None:
        return
    far = 0 if disk is None else disk.num_hit_tokens
    near = stats.num_prefix_hit_tokens - host.num_hit_tokens
    hits = {("device",): near, ("host",): host.num_hit_tokens - far, ("disk",): far}
    text = "Prompt tokens found computed, by the tier that had them."
    yield counter("prefix_cache_tier_hits", text, hits, "tier")
