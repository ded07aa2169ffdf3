"""How much of a layer of experts falls to the device that has the most to do. No JAX.

Devices wait for the slowest at every layer, and routing is uneven by chance alone. Of E experts, k
for each of n tokens chosen at random, a device has E / P. It reads those that any token has chosen:
each with probability p = 1 - (1 - k/E)^n, so E/P p of them on average with variance E/P p (1 - p).
Of the n k pairs it computes one in P, with the variance of that many draws. The largest of P such
numbers is expected as far above their mean as the largest of P normal ones: the normal score of G.
Blom, Statistical Estimates and Transformed Beta-Variables (1958).

Routers that prefer some experts add to that: `skew`, the pairs of the most loaded device over those
of an average one with many tokens; 1 where nothing is known of the traffic. Where the experts are
split fewer ways each device has more of them, and what neighbours have beyond their share cancels
out in part (`skew_of`). A device that has them all has all of the pairs, whatever the routing.

Several devices that have the same experts and the same tokens deal the pairs, which lie sorted by
expert, out in equal parts. Only what they have between them is uneven then. A part begins and ends
amid an expert, so a device reads up to two beyond its share.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

from shiftjax.arch.config import Experts
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

ROOM = 2.0  # of an exchange, over what random routing takes on average
SPREAD = 4.0


class Load(NamedTuple):
    """What the device with the most to do computes of a layer, and what it reads for that."""

    pairs: float  # of tokens and experts
    experts: float  # that any token has chosen


def most_loaded(experts: Experts, ways: int, num_tokens: int, skew: float = 1.0) -> Load:
    """The load of the slowest device for some tokens, where experts are split so many `ways`."""
    chosen = num_tokens * experts.per_token
    if not chosen:
        return Load(0.0, 0.0)
    own, share = experts.num / ways, 1 / ways
    p = 1 - (1 - experts.per_token / experts.num) ** num_tokens
    read = _most(own * p, own * p * (1 - p), ways)
    pairs = _most(chosen * share, chosen * share * (1 - share), ways) * skew
    # Somebody has an expert of the first token, and nobody reads more experts than it has.
    return Load(min(max(pairs, 1.0), chosen), min(max(read, 1.0), own))


def dealt(load: Load, holders: int) -> Load:
    """The part of a load that each of so many devices has, of pairs sorted by expert."""
    if holders == 1 or not load.pairs:
        return load
    pairs = max(1.0, load.pairs / holders)
    read = load.experts / holders + 2 - 1 / holders
    return Load(pairs, min(pairs, read, load.experts))


def skew_of(skew: float, num_devices: int, ways: int) -> float:
    """The skew of experts that are split so many ways, by that of so many devices.

    As if what devices have beyond their share were independent: of neighbours' sums it falls with
    the root of their number, and the largest of fewer numbers is nearer to the mean.
    """
    if ways == 1 or skew == 1.0:
        return 1.0
    scores = _score(ways) / _score(num_devices)
    return 1 + (skew - 1) * scores * (ways / num_devices) ** 0.5


def room_of_exchange(layout: Layout, mode: Mode, num_tokens: int) -> int:
    """Rows that each device keeps free for each other one, to exchange pairs with; 0: gather.

    n k / P^2 pairs go from a device to another on average; there is room for ROOM times as many and
    for SPREAD standard deviations more, or for all that it could send. A device then receives
    P * room rows of width d and sends them back, where gathering brings n rows and scatters as
    many. What moves fewer is done.
    """
    experts, devices = layout.model.experts, layout.num_devices
    if experts is None or mode.sp == 1 or num_tokens % devices:
        return 0
    pairs = num_tokens // devices * experts.per_token  # of a device's own tokens
    mean = pairs / devices
    room = min(pairs, math.ceil(max(ROOM * mean, mean + SPREAD * mean**0.5)))
    moved = 2 * room * (devices - 1) + num_tokens // mode.sp * (1 - 1 / layout.ways(mode))
    gathered = 2 * num_tokens * (1 - 1 / mode.sp)
    gathered += 2 * num_tokens // mode.sp * (1 - 1 / layout.ways(mode))
    return room if moved < gathered else 0


def room_to_exchange(layout: Layout, mode: Mode, experts: Mode, num_tokens: int) -> int:
    """Rows kept free for pairs between any two devices; 0: tokens are gathered, or not moved.

    Only experts over all devices have pairs sent to them.
    """
    return room_of_exchange(layout, mode, num_tokens) if experts.sp == 1 else 0


def _most(mean: float, variance: float, count: int) -> float:
    """The expected largest of `count` numbers with this mean and variance."""
    return mean + _score(count) * variance**0.5


def _score(count: int) -> float:
    """By how many deviations the largest of `count` numbers is expected above their mean."""
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
