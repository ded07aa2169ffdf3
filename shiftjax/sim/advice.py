"""The least devices that answer a load within limits, found by replay. No JAX.

Servers are tried the cheapest first: so many of each as the closed form says are needed at least
(`servers.py`). A trial is a replay of one server's share of the load. What misses the limits by
little is changed (`variants.py`); what misses them still is tried again with more servers, when
their cost has its turn. So when one keeps the limits, in the replays of all seeds, all that is
cheaper has been tried or cannot be enough. Of equal cost the one is taken that loses least and has
most room below the limits.
"""

import math
from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from shiftjax.sim.servers import Field, Server
from shiftjax.sim.trials import Trial, Trials, cost_of
from shiftjax.sim.variants import Changes

MOST_SERVERS = 1024
MOST_REPLAYS = 120  # about a minute and a half of one core
IDLE = 0.2  # requests at once, on average: more servers would make none of them quicker
STRIDE = 0.4  # more servers, for each time that the limits are missed by
MOST_STRIDE = 2.0


class Question(NamedTuple):
    """What is asked: devices for so many requests/s, or users; or the most for so many devices."""

    rate: float | None
    num_devices: int | None = None


class Advice(NamedTuple):
    """All trials in order, and the best one that keeps the limits."""

    question: Question
    trials: Trials
    best: Trial | None
    field: Field
    left_out: int  # servers that no replay was needed for
    is_complete: bool  # whether all was tried that might have been better

    @property
    def reasons(self) -> dict[str, str]:
        """Why a deployment was not tried."""
        return self.field.reasons


def least_devices(
    field: Field,
    trials: Trials,
    rate: float,
    prices: Mapping[str, float],
    budgets: Mapping[str, Any],
) -> Advice:
    """Find the fewest devices, or with prices the least cost, that keep the limits.

    `prices` are of a device and hour, by machine, or empty.
    """
    changes, number = Changes(trials, budgets), count()
    heap: list[tuple[float, int, float, int, Server, int]] = []

    def push(server: Server, num: int) -> None:
        if num <= MOST_SERVERS:
            ratio = server.ratio(trials.load.each(rate, num), trials.limits)
            cost = cost_of(server, num, prices)
            heappush(heap, (cost, server.rank, ratio, next(number), server, num))

    for server in field.servers:
        push(server, math.ceil(rate / server.most_load))
    best: Trial | None = None
    touched: set[int] = set()
    while heap and not trials.is_over:
        cost, rank, *_, server, num = heap[0]
        if best and (cost, rank) > (best.cost(prices), best.server.rank):
            break
        heappop(heap)
        touched.add(id(server))
        trial = trials.first(server, num, rate)
        if trial.meets and (best is None or _room(trials, trial) < _room(trials, best)):
            trial = trials.confirmed(trial, rate)
        kept = trial if trial.meets else None
        if kept is None and best is None:
            kept = changes.kept(trial, rate)
        if kept is None and not trial.meets and not _is_idle(trials, trial):
            push(server, _more(trials, trial))
        best = _better(trials, best, kept, prices)
    if best is not None:
        best = _fewer(trials, best, rate)
    left_out = sum(id(server) not in touched for server in field.servers)
    return Advice(Question(rate), trials, best, field, left_out, not trials.is_over)


def _room(trials: Trials, trial: Trial) -> float:
    return trials.limits.ratio(trial.ttft, trial.tpot)


def _better(
    trials: Trials, best: Trial | None, found: Trial | None, prices: Mapping[str, float]
) -> Trial | None:
    """Of two that keep the limits, the cheaper; then what loses least; then what has most room."""
    both = [trial for trial in (best, found) if trial is not None]

    def key(trial: Trial) -> tuple[float, int, float]:
        return trial.cost(prices), trial.server.rank, _room(trials, trial)

    return min(both, key=key, default=None)


def _is_idle(trials: Trials, trial: Trial) -> bool:
    """Whether a server has hardly ever a request, so that more of them change nothing."""
    load, life = trials.load, trial.ttft + trial.tpot * trials.load.mean.num_output_tokens
    is_of_one_user = load.think is not None and trial.rate <= 1
    return is_of_one_user or load.at_once(trial.rate, life) < IDLE


def _more(trials: Trials, trial: Trial) -> int:
    """How many to try next: the more, the further the trial was from the limits."""
    ratio = trials.limits.ratio(trial.ttft, trial.tpot)
    stride = min(MOST_STRIDE, 1 + STRIDE * max(0.0, ratio - 1))
    return max(trial.num_servers + 1, int(trial.num_servers * stride))


def _fewer(trials: Trials, best: Trial, rate: float) -> Trial:
    """With fewer of the same servers, where a stride had left some out."""
    missed = [
        each.num_servers
        for each in trials.all
        if each.server.text == best.server.text
        and each.server.target == best.server.target
        and each.num_servers < best.num_servers
    ]
    low, high = max(missed, default=best.num_servers - 1) + 1, best.num_servers
    while low < high and not trials.is_over:
        middle = (low + high) // 2
        trial = trials.first(best.server, middle, rate, best.changed)
        if trial.meets:
            trial = trials.confirmed(trial, rate)
        low, high = (low, middle) if trial.meets else (middle + 1, high)
        best = trial if trial.meets else best
    return best
