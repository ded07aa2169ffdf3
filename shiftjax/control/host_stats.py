"""What the host tier has done and holds, over all groups. No JAX."""

from collections.abc import Sequence
from dataclasses import dataclass

from shiftjax.control.block_tables import BlockTables


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


def host_stats(tables: Sequence[BlockTables]) -> HostStats | None:
    """The sums over groups; None without a host tier."""
    hosts = [each.host for each in tables if each.host is not None]
    if not hosts:
        return None
    memory = hosts[0].memory
    return HostStats(
        num_query_tokens=sum(each.num_host_query_tokens for each in tables),
        num_hit_tokens=sum(each.num_host_hit_tokens for each in tables),
        num_offloaded_bytes=sum(each.num_offloaded_blocks * each.block_bytes for each in hosts),
        num_restored_bytes=sum(each.num_restored_blocks * each.block_bytes for each in hosts),
        num_used_bytes=memory.num_used_bytes,
        num_bytes=memory.num_bytes,
        num_prefetches=sum(each.num_prefetches for each in hosts),
        num_prefetch_hits=sum(each.num_prefetch_hits for each in hosts),
    )
