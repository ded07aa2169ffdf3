"""What the features of an engine tell: each has its own, here they are put together. No JAX."""

from collections.abc import Iterator
from typing import Any

from serving.server import kv_events
from serving.server.async_embedder import AsyncEmbedder
from serving.server.async_engine import AsyncEngine
from shiftjax.adapters import state_told
from shiftjax.adapters.pool import AdapterState
from shiftjax.core import kept_blocks
from shiftjax.core.kept_blocks import KeptStats
from shiftjax.core.stats import EngineStats
from shiftjax.disk_tier import disk_stats
from shiftjax.disk_tier.disk_stats import DiskStats
from shiftjax.drafts import speculation
from shiftjax.drafts.speculation import DraftStats
from shiftjax.fleet import state as fleet_state
from shiftjax.fleet.state import FleetState
from shiftjax.host_tier import host_stats
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.hosts import replicas
from shiftjax.hosts.replicas import ReplicaState
from shiftjax.metric import Metric
from shiftjax.phases import resharding
from shiftjax.phases.resharding import ReshardingState
from shiftjax.routing import history as routing_history
from shiftjax.routing.history import RoutingState
from shiftjax.sizing import size_stats
from shiftjax.sizing.size_stats import SizeStats
from shiftjax.sizing.target_sizes import TargetStats


def feature_metrics(engine: AsyncEngine | AsyncEmbedder) -> Iterator[Metric]:
    """Metrics of now. What is off yields its histograms without values, or nothing."""
    stats = engine.stats
    yield from host_stats.metrics(stats.find(HostStats))
    yield from disk_stats.metrics(stats.find(DiskStats))
    yield from disk_stats.hits_by_tier(stats)
    yield from kept_blocks.metrics(stats.find(KeptStats))
    yield from speculation.metrics(stats.find(DraftStats))
    yield from fleet_state.metrics(stats.find(FleetState))
    yield from resharding.metrics(stats.find(ReshardingState))
    yield from size_stats.metrics(stats.find(SizeStats))
    yield from routing_history.metrics(stats.find(RoutingState))
    yield from state_told.metrics(stats.find(AdapterState))
    yield from replicas.metrics(stats.find(ReplicaState))
    if isinstance(engine, AsyncEngine):
        yield from kv_events.metrics(engine.kv_events)


def page_parts(stats: EngineStats) -> dict[str, Any]:
    """What the page shows of each, as plain values by its name; None: it is off."""
    drafts, fleet = stats.find(DraftStats), stats.find(FleetState)
    sizes, told = stats.find(TargetStats), stats.find(SizeStats)
    routing, adapters = stats.find(RoutingState), stats.find(AdapterState)
    return {
        "adapters": None if adapters is None else state_told.page_part(adapters),
        "drafts": None if drafts is None else drafts.by_drafter,
        "experts": None if routing is None else routing_history.page_part(routing),
        "fleet": None if fleet is None else fleet_state.page_part(fleet),
        "step_sizes": None if told is None else size_stats.page_part(told),
        "by_targets": None if sizes is None else sizes.words,
    }
