"""How much of a layer of experts falls to the device that has the most to do. No JAX.

Devices wait for the slowest at every layer, and routing is uneven by chance alone. Of E experts, k
for each of n tokens chosen at random, a device has E / P. It reads those that any token has chosen:
each with probability p = 1 - (1 - k/E)^n, so E/P p of them on average with variance E/P p (1 - p).
Of the n k pairs it computes one in P, with the variance of that many draws. The largest of P such
numbers is expected as far above their mean as the largest of P normal ones: the normal score of G.
Blom, Statistical Estimates and Transformed Beta-Variables (1958).

Routers that prefer some experts add to that: `skew`, the pairs of the most loaded device over those
of an average one with many tokens; 1 where nothing is known of the traffic.
"""

from statistics import NormalDist
from typing import NamedTuple

from shiftjax.arch.config import Experts


class Load(NamedTuple):
    """What the device with the most to do computes of a layer, and what it reads for that."""

    pairs: float  # of tokens and experts
    experts: float  # that any token has chosen


def most_loaded(experts: Experts, num_devices: int, num_tokens: int, skew: float = 1.0) -> Load:
    """The load of the slowest of the devices that split the experts, for a step's tokens."""
    chosen = num_tokens * experts.per_token
    if not chosen:
        return Load(0.0, 0.0)
    own, share = experts.num / num_devices, 1 / num_devices
    p = 1 - (1 - experts.per_token / experts.num) ** num_tokens
    read = _most(own * p, own * p * (1 - p), num_devices)
    pairs = _most(chosen * share, chosen * share * (1 - share), num_devices) * skew
    # Somebody has an expert of the first token, and nobody reads more experts than it has.
    return Load(min(max(pairs, 1.0), chosen), min(max(read, 1.0), own))


def _most(mean: float, variance: float, count: int) -> float:
    """The expected largest of `count` numbers with this mean and variance."""
    if count == 1:
        return mean
    return mean + NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) * variance**0.5
