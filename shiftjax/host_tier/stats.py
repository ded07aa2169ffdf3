"""What the host tier has done and holds, over all groups. No JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HostStats:
    """Counters since the start, and the bytes of now."""

    num_query_tokens: int  # of prompts, looked up because the device did not have them
    num_hit_tokens: int
    num_offloaded_bytes: int
    num_restored_bytes: int
    num_used_bytes: int
    num_bytes: int  # the budget
    num_prefetches: int = 0  # chunks brought to devices before a sequence was admitted
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
