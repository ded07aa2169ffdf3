"""The most load that so many devices answer within limits, found by replay. No JAX.

Servers come in the order of what the closed form says they can do at most (`servers.py`). One that
cannot have more than the best so far is left out. Any other has to keep the limits above that, and
what it has between this and its most is halved until it is known to `EXACT`: with one replay each,
and in half of all replays. Those that lead are confirmed with all seeds, lowered until they are
kept, and changed (`variants.py`) as long as that brings more: targets come first. What was passed
over, and may be better than what all seeds keep once it is changed, comes last: it is asked for
more than that alone.
"""

from collections.abc import Iterable, Mapping
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
MORE = 1.15  # times the closed form, that a server may carry once it is changed
LEAST = 0.03  # of the most by closed form: below it a server has none
UNCHANGED = 0.5  # share of the replays, at most, that servers get as they are
LEADERS = 3  # servers that are changed


def most_load(field: Field, trials: Trials, num_devices: int, budgets: Mapping[str, Any]) -> Advice:
    """Find the servers on so many devices in all that keep the limits under the most load."""
    fitting = [each for each in field.servers if num_devices % each.num_devices == 0]
    fitting.sort(key=lambda each: (-_most(each, num_devices), each.rank))
    tried, passed, is_cut = _as_they_are(trials, fitting, num_devices)
    best: Trial | None = None
    leaders = _leaders(trials, tried)
    for leader in leaders:
        if leader.meets and (best is None or _total(leader) >= _next(trials, best)):
            best = _kept_by_all(trials, leader, best)
    for leader in leaders:
        best = _changed(trials, leader, best, budgets)
    for server in passed:
        if best is None or MORE * _most(server, num_devices) <= _next(trials, best):
            continue
        num = num_devices // server.num_devices
        unasked = Trial(server, num, trials.load.each(_next(trials, best), num), (), False)
        best = _changed(trials, unasked, best, budgets)
    touched = {id(trial.server) for trial in trials.all}
    left_out = sum(id(server) not in touched for server in field.servers)
    is_complete = not (is_cut or trials.is_over)
    return Advice(Question(None, num_devices), trials, best, field, left_out, is_complete)


def _as_they_are(
    trials: Trials, servers: Iterable[Server], num_devices: int
) -> tuple[list[Trial], list[Server], bool]:
    """Return the last trial of each server, with one seed; those passed over; and if replays ended.

    Passed over are servers that the best of one seed is above by closed form. All seeds may lower
    that below them.
    """
    tried, passed, is_cut = list[Trial](), list[Server](), False
    best: Trial | None = None
    for server in servers:
        bound = _most(server, num_devices)
        if best is not None and bound <= _next(trials, best):
            passed.append(server)
            continue
        if trials.num_replays >= UNCHANGED * trials.most_replays:
            is_cut = True
            continue
        found = _above(trials, server, num_devices // server.num_devices, bound, best)
        if found.meets:
            found = best = _highest(trials, found, bound)
        tried.append(found)
    return tried, passed, is_cut


def _leaders(trials: Trials, tried: Iterable[Trial]) -> list[Trial]:
    """The best of these, and who may carry most by how near they were to the limits."""
    ratio = trials.limits.ratio
    able = [each for each in tried if not each.refused]
    able.sort(key=lambda each: -_total(each) / ratio(each.ttft, each.tpot))
    best = max((each for each in able if each.meets), key=_total, default=None)
    others = [each for each in able if each is not best]
    return [*filter(None, [best]), *others][:LEADERS]


def _changed(
    trials: Trials, leader: Trial, best: Trial | None, budgets: Mapping[str, Any]
) -> Trial | None:
    """The best of all, which may be this one, changed as long as that keeps the limits."""
    changes, own = Changes(trials, budgets), leader
    while not trials.is_over:
        rate = _next(trials, best) if best else _total(own)
        missed = trials.first(own.server, own.num_servers, rate, own.changed)
        missed = trials.confirmed(missed, rate)
        found = missed if missed.meets else changes.kept(missed, rate)
        if found is None:
            break
        is_new, own = found.changed != own.changed or not own.measured, found
        best = found  # all seeds keep it
        if is_new:
            most = _highest(trials, found, WIDER * _total(found))
            best = own = _kept_by_all(trials, most, found) or found
    return best


def _most(server: Server, num_devices: int) -> float:
    return server.most_load * (num_devices // server.num_devices)


def _total(trial: Trial) -> float:
    return trial.rate * trial.num_servers


def _next(trials: Trials, best: Trial) -> float:
    """The load that a better one has to keep; a user more, at least."""
    total = _total(best)
    more = total * (1 + EXACT)
    return more if trials.load.think is None else max(more, total + 1)


def _above(trials: Trials, server: Server, num: int, bound: float, best: Trial | None) -> Trial:
    """A trial of this server above the best load; the last one, if none keeps the limits."""
    rate, each = _next(trials, best) if best else SLOW * bound, trials.load.each
    while True:
        trial = trials.first(server, num, rate)
        is_last = best is not None or trial.refused or rate < LEAST * bound or trials.is_over
        if trial.meets or is_last or each(LOWER * rate, num) == trial.rate:
            return trial
        rate *= LOWER


def _has_room(trials: Trials, trial: Trial) -> bool:
    """Whether a replay keeps the limits with the margin, which the mean of all seeds has to."""
    ratio = trials.limits.ratio(trial.ttft, trial.tpot)
    return trial.meets and ratio <= 1 - trials.margin


def _highest(trials: Trials, kept: Trial, bound: float) -> Trial:
    """A trial of these servers under the most load that has room with one replay, or `kept`."""
    low, high, num = _total(kept), bound, kept.num_servers
    each = trials.load.each
    while high > low * (1 + EXACT) and not trials.is_over:
        middle = sqrt(low * high)
        if each(middle, num) == each(high, num):  # the same users
            break
        trial = trials.first(kept.server, num, middle, kept.changed)
        if _has_room(trials, trial):
            low, kept = _total(trial), trial
        else:
            high = middle
    return kept


def _kept_by_all(trials: Trials, kept: Trial, best: Trial | None) -> Trial | None:
    """The most load of these servers that all seeds keep; the best so far if that is less."""
    lowest, num, rate = _next(trials, best) if best else 0.0, kept.num_servers, _total(kept)
    kept = trials.confirmed(kept, rate)
    while not kept.meets and not trials.is_over:
        rate = _less(trials, kept, rate)
        if rate < lowest or not rate:
            break
        kept = trials.first(kept.server, num, rate, kept.changed)
        kept = trials.confirmed(kept, rate)
    return kept if kept.meets else best


def _less(trials: Trials, missed: Trial, rate: float) -> float:
    """The load that is tried after this one was missed: a user less on each server, at least.

    Less by half of what the worst seed missed the limits by, or the mean the margin.
    """
    ratio = trials.limits.ratio
    worst = max(ratio(each.ttft, each.tpot) for each in missed.measured)
    mean = ratio(missed.ttft, missed.tpot) / (1 - trials.margin)
    less = rate * min(1 - EXACT, max(LOWER, max(worst, mean) ** -0.5))
    return less if trials.load.think is None else min(less, rate - missed.num_servers)
