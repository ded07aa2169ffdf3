"""The most requests per second that so many devices answer within limits, found by replay. No JAX.

Servers come in the order of what the closed form says they can do at most (`servers.py`). One that
cannot have more than the best so far is left out. Any other has to keep the limits at a rate above
that. Then the rate between this and its most is halved until it is known to `EXACT`; and lowered
until it is kept with all seeds. What is the best in the end is changed (`variants.py`), as long as
that brings more.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from shiftjax.sim.advice import Advice, Question
from shiftjax.sim.servers import Field, Server
from shiftjax.sim.trials import Trial, Trials
from shiftjax.sim.variants import Changes

EXACT = 0.02  # of a rate
SLOW = 0.5  # of the most by closed form, which is tried first
LOWER = 0.5  # of a rate that the first server missed
WIDER = 1.3  # times the best rate, that a change may bring
LEAST = 0.03  # of the most by closed form: below it a server has none


def most_load(field: Field, trials: Trials, num_devices: int, budgets: Mapping[str, Any]) -> Advice:
    """Find the servers on so many devices in all that keep the limits at the highest rate."""
    fitting = [each for each in field.servers if num_devices % each.num_devices == 0]
    fitting.sort(key=lambda each: (-_most(each, num_devices), each.rank))
    best: Trial | None = None
    left_out = len(field.servers) - len(fitting)
    for server in fitting:
        bound = _most(server, num_devices)
        if trials.is_over or (best is not None and bound <= _next(best)):
            left_out += 1
            continue
        found = _above(trials, server, num_devices // server.num_devices, bound, best)
        if found is not None:
            best = _highest(trials, found, bound, best)
    if best is not None:
        best = _changed(trials, best, budgets)
    return Advice(Question(None, num_devices), trials, best, field, left_out, not trials.is_over)


def _changed(trials: Trials, best: Trial, budgets: Mapping[str, Any]) -> Trial:
    """The best, changed as long as that keeps the limits at a higher rate."""
    changes = Changes(trials, budgets)
    while not trials.is_over:
        rate = _next(best)
        missed = trials.first(best.server, best.num_servers, rate, best.changed)
        missed = trials.confirmed(missed, rate)
        found = missed if missed.meets else changes.kept(missed, rate)
        higher = found and _highest(trials, found, WIDER * _total(found), best)
        if higher is None or higher is best:
            break
        best = higher
    return best


def _most(server: Server, num_devices: int) -> float:
    return server.most_rate * (num_devices // server.num_devices)


def _total(trial: Trial) -> float:
    return trial.rate * trial.num_servers


def _next(best: Trial) -> float:
    """The rate that a better one has to keep."""
    return _total(best) * (1 + EXACT)


def _above(
    trials: Trials, server: Server, num: int, bound: float, best: Trial | None
) -> Trial | None:
    """A trial of this server that keeps the limits above the best rate."""
    rate = _next(best) if best else SLOW * bound
    while not trials.is_over:
        trial = trials.first(server, num, rate)
        if trial.meets:
            return trial
        if best is not None or trial.refused or rate < LEAST * bound:
            break
        rate *= LOWER
    return None


def _has_room(trials: Trials, trial: Trial) -> bool:
    """Whether a replay keeps the limits with the margin, which the mean of all seeds has to."""
    ratio = trials.limits.ratio(trial.ttft, trial.tpot)
    return trial.meets and ratio <= 1 - trials.margin


def _highest(trials: Trials, kept: Trial, bound: float, best: Trial | None) -> Trial | None:
    """The highest rate of these servers that all seeds keep; the best so far if that is less."""
    low, high, lowest = _total(kept), bound, _next(best) if best else 0.0
    while high > low * (1 + EXACT) and not trials.is_over:
        middle = sqrt(low * high)
        trial = trials.first(kept.server, kept.num_servers, middle, kept.changed)
        low, high, kept = (middle, high, trial) if _has_room(trials, trial) else (low, middle, kept)
    kept = trials.confirmed(kept, low)  # with all seeds
    while not kept.meets and low * (1 - EXACT) >= lowest and not trials.is_over:
        low *= 1 - EXACT
        kept = trials.first(kept.server, kept.num_servers, low, kept.changed)
        kept = trials.confirmed(kept, low)
    return kept if kept.meets else best
