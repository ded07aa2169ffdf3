"""Which experts tokens have chosen of late, by layer: a moving histogram. No JAX.

Devices count the pairs of tokens and experts that they compute. What is older counts less: half as
much, when `HALF_LIFE` more tokens have been counted. From the histogram follows how uneven the
loads of devices are, for whatever number of them splits the experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shiftjax.costs.routing import Routing, num_counted
from shiftjax.deploy.deployment import Deployment
from shiftjax.metric import Metric, counter, gauge

HALF_LIFE = 1 << 19  # tokens
LEAST_TOKENS = 4096  # to be counted before anybody is told, and before they are told again
LEAST_CHANGE = 0.02  # of a skew, for which they are


@dataclass(frozen=True)
class RoutingState:
    """What has been counted, as of now; layers are those with experts."""

    counts: np.ndarray  # [layers, experts]: pairs, old ones counting less
    num_tokens: int  # whose experts were counted since the start
    per_token: int  # experts of a token
    ways: tuple[int, ...]  # numbers of devices that split experts, in some mode
    padded_for: int  # devices; experts are a multiple of them, the last ones without tokens

    @cached_property
    def skews(self) -> dict[int, np.ndarray]:
        """Pairs of the most loaded device over those of an average one: by ways, of each layer."""
        routing = Routing.of_counts(self.counts, self.per_token, self.padded_for)
        return {ways: routing.skews(ways) for ways in self.ways}

    @cached_property
    def hottest(self) -> np.ndarray:
        """The share of a layer's pairs that its most chosen expert has."""
        return self.counts.max(axis=1) / np.maximum(self.counts.sum(axis=1), 1)


class RoutingHistory:
    """The moving histogram of one model, whichever groups and phases compute its steps.

    `watchers` are called with the counts when skews have changed: whoever predicts seconds.
    """

    def __init__(self, num_layers: int, sizes: tuple[int, int], ways: Sequence[int], devices: int):
        num_experts, per_token = sizes
        counts = np.zeros((num_layers, num_experts))
        self.state = RoutingState(counts, 0, per_token, tuple(ways), devices)
        self.watchers: list[Callable[[np.ndarray], None]] = []
        self._told, self._told_at = np.ones(len(ways)), 0

    def told(self) -> RoutingState:
        """The histogram as of now, which changes no more."""
        return self.state

    def add(self, first: int, counts: np.ndarray) -> None:
        """Add counted pairs of layers from the `first` on, `[layers, experts]`."""
        state, num = self.state, len(counts)
        pairs = counts.sum(axis=1, keepdims=True)
        kept = 0.5 ** (pairs / state.per_token / HALF_LIFE)
        moved, rows = state.counts.copy(), slice(first, first + num)
        moved[rows] = kept * moved[rows] + counts
        new = int(pairs[0, 0]) // state.per_token if first == 0 else 0
        per_token, ways, devices = state.per_token, state.ways, state.padded_for
        self.state = RoutingState(moved, state.num_tokens + new, per_token, ways, devices)
        if first + num == len(moved):
            self._tell()

    def _tell(self) -> None:
        """Tell watchers, if skews differ from what they were told last."""
        state = self.state
        is_seen = state.counts.sum(axis=1).min() > 0
        if not is_seen or state.num_tokens - self._told_at < LEAST_TOKENS:
            return
        skews = np.array([state.skews[ways].mean() for ways in state.ways])
        if np.all(np.abs(skews / self._told - 1) < LEAST_CHANGE):
            return
        self._told, self._told_at = skews, state.num_tokens
        for watcher in self.watchers:
            watcher(state.counts)


def history_of(deployments: Sequence[Deployment]) -> RoutingHistory | None:
    """Return the histogram of a model, of which these run; None: it has no experts to count."""
    model = deployments[0].layout.model
    if model.experts is None or not num_counted(model):
        return None
    layouts = [one.layout for each in deployments for one in each.by_width.values()]
    ways = {layout.ways(mode) for layout in layouts for mode in layout.modes}
    sizes = model.experts.num, model.experts.per_token
    devices = max(layout.padded_for for layout in layouts)
    return RoutingHistory(num_counted(model), sizes, sorted(ways - {1}), devices)


def metrics(state: RoutingState | None) -> Iterator[Metric]:
    """How uneven routing is; nothing of models without experts, nor before it is known."""
    if state is None or not state.num_tokens:
        return
    yield counter("routed_tokens", "Tokens whose experts were counted.", state.num_tokens)
    text = "Pairs of tokens and experts on the most loaded device, over the mean, if so many"
    skews = {
        (str(ways), layers): value
        for ways, found in state.skews.items()
        for layers, value in _over_layers(found).items()
    }
    text += " devices split the experts: of the mean layer and of the worst."
    yield gauge("expert_skew", text, skews, "devices", "layers")
    text = "Share of a layer's pairs that its most chosen expert has."
    hottest = {(layers,): value for layers, value in _over_layers(state.hottest).items()}
    yield gauge("expert_hottest_share", text, hottest, "layers")


def _over_layers(found: np.ndarray) -> dict[str, float]:
    return {"mean": float(found.mean()), "worst": float(found.max())}


def plain_state(state: RoutingState) -> dict[str, Any]:
    """The histogram and what follows from it, as plain values."""
    return {
        "num_tokens": state.num_tokens,
        "per_token": state.per_token,
        "skew": {str(ways): found.round(4).tolist() for ways, found in state.skews.items()},
        "hottest_share": state.hottest.round(4).tolist(),
        "counts": state.counts.round().astype(int).tolist(),
    }


def plain_sums(state: RoutingState) -> dict[str, Any]:
    """The same without layers: means over them."""
    skews = {ways: float(found.mean()) for ways, found in state.skews.items()}
    hottest = float(state.hottest.mean())
    return {"num_tokens": state.num_tokens, "skew": skews, "hottest_share": hottest}


def page_part(state: RoutingState) -> dict[str, Any] | None:
    """What the page shows: a sentence; None: nothing is known yet, or devices split no experts."""
    if not state.num_tokens or not state.ways:
        return None
    ways = state.ways[-1]
    skew = state.skews[ways]
    words = f"Experts over {ways} devices: the most loaded one has {skew.mean():.2f} times the mean"
    return {"words": f"{words}, in the worst layer {skew.max():.2f}."}
