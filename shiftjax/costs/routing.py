"""What real routing gives the device that has the most to do of a layer of experts. No JAX.

`expert_load.py` assumes that every expert is as likely as any other. Here tokens choose expert e of
a layer with a chance c_e of its own, of which the sum is k. Of n tokens a device computes n times
the sum over its experts, with the variance of as many draws. It reads expert e with probability
1 - (1 - c_e)^n. Both are taken as normal, and devices as independent, so the largest of them is
expected at the integral over x of [x > 0] - prod_d Phi((x - m_d) / s_d), by the trapezoidal rule.
Phi is a logistic function (S. R. Bowling and others, A logistic approximation to the cumulative
normal distribution, 2009), which is wrong by at most 0.00014.

Layers differ, and devices wait for the slowest at each: loads are means over layers of the largest.
"""

from functools import lru_cache

import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.costs.expert_load import Load
from shiftjax.costs.group_costs import GroupCosts

POINTS = 24  # of an integral
BELOW, ABOVE = 4.0, 5.0  # deviations that it goes over
DIGITS = 6  # of a load: products are cut into tiles, and a trifle more would be a tile more


class Routing:
    """How often tokens choose each expert of each layer, in the order in which devices have them.

    `chances` are `[layers, experts]`, each row with the sum of a token's experts; experts that are
    padding have none. The number of experts is a multiple of all ways that devices split them.
    """

    def __init__(self, chances: np.ndarray):
        self.chances = np.asarray(chances, np.float64)
        self._logs = np.log1p(-np.minimum(self.chances, 1 - 1e-12))  # that no token chooses it
        self.most_loaded = lru_cache(maxsize=1024)(self._most_loaded)

    @classmethod
    def of_counts(cls, counts: np.ndarray, per_token: int, padded_for: int = 1) -> "Routing":
        """Return what these counts of chosen experts, `[layers, experts]`, say of the next tokens.

        With as many experts behind them as make the number a multiple of `padded_for`.
        """
        totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
        chances = np.minimum(counts / totals * per_token, 1.0)
        return cls(np.pad(chances, ((0, 0), (0, -counts.shape[1] % padded_for))))

    def skews(self, ways: int) -> np.ndarray:
        """Return the pairs of the most loaded of so many devices over the mean, of each layer."""
        shares = self._shares(ways)
        means = shares.mean(axis=1)
        return np.where(means > 0, shares.max(axis=1) / np.maximum(means, 1e-12), 1.0)

    def _shares(self, ways: int) -> np.ndarray:
        """Return what devices compute of a token, `[layers, ways]`."""
        return self.chances.reshape(len(self.chances), ways, -1).sum(axis=2)

    def _most_loaded(self, ways: int, num_tokens: int) -> Load:
        """Return the load of the slowest of the devices that split the experts, for these tokens.

        A mean over layers; see `expert_load.most_loaded`.
        """
        if not num_tokens or not len(self.chances):
            return Load(0.0, 0.0)
        shares = self._shares(ways)
        k = np.maximum(shares.sum(axis=1, keepdims=True), 1e-12)
        pairs = _largest(num_tokens * shares, num_tokens * shares * (1 - shares / k))
        read = -np.expm1(num_tokens * self._logs)
        by_device = read.reshape(len(read), ways, -1)
        experts = _largest(by_device.sum(axis=2), (by_device * (1 - by_device)).sum(axis=2))
        own = by_device.shape[2]
        # Somebody has an expert of the first token, and nobody reads more experts than it has.
        most = num_tokens * float(k.mean())
        pairs, experts = np.clip(pairs, 1.0, most), np.clip(experts, 1.0, own)
        return Load(*(round(float(each.mean()), DIGITS) for each in (pairs, experts)))


def num_counted(model: ModelConfig) -> int:
    """Return how many layers of a model have experts whose tokens are counted.

    Late layers, which compute logit rows alone, count none.
    """
    return sum(parts.has_experts for parts in model.parts[: model.num_early_layers])


def price(costs: GroupCosts, counts: np.ndarray) -> None:
    """From now on let experts take what these counts say, `[layers with experts, experts]`."""
    first = 0
    for stage in costs.stages:
        model, num = stage.model, num_counted(stage.model)
        if model.experts is not None and num:
            own, padded_for = counts[first : first + num], stage.layout.padded_for
            stage.price(Routing.of_counts(own, model.experts.per_token, padded_for))
        first += num


def _largest(means: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Return the expected largest of the normal numbers in each row, `[rows, count]`."""
    if means.shape[1] == 1:
        return means[:, 0]
    spread = np.sqrt(np.maximum(variances, 1e-12))
    low = (means - BELOW * spread).max(axis=1)
    high = np.maximum((means + ABOVE * spread).max(axis=1), low + 1e-9)
    x = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, POINTS)[None]
    z = (x[:, None] - means[:, :, None]) / spread[:, :, None]
    below = 1 / (1 + np.exp(np.minimum(-z * (1.5976 + 0.07056 * z * z), 60)))
    return low + np.trapezoid(1 - below.prod(axis=1), x, axis=1)
