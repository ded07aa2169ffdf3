"""The metrics of an engine's features: each feature yields its own, here they meet. No JAX."""

from collections.abc import Iterator

from serving.server import kv_events
from serving.server.async_embedder import AsyncEmbedder
from serving.server.async_engine import AsyncEngine
from shiftjax.drafts import speculation
from shiftjax.drafts.speculation import DraftStats
from shiftjax.fleet import state as fleet_state
from shiftjax.fleet.state import FleetState
from shiftjax.host_tier import stats as host_stats
from shiftjax.host_tier.stats import HostStats
from shiftjax.metric import Metric
from shiftjax.phases import control as resharding
from shiftjax.phases.control import ReshardingState


def feature_metrics(engine: AsyncEngine | AsyncEmbedder) -> Iterator[Metric]:
    """As of now. What is off yields its histograms without values, or nothing."""
    stats = engine.stats
    yield from host_stats.metrics(stats.find(HostStats))
    yield from speculation.metrics(stats.find(DraftStats))
    yield from fleet_state.metrics(stats.find(FleetState), stats.num_prefix_hits_elsewhere)
    yield from resharding.metrics(stats.find(ReshardingState))
    if isinstance(engine, AsyncEngine):
        yield from kv_events.metrics(engine.kv_events)
