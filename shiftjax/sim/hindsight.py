"""The best choice of a deployment in hindsight, which a policy is measured against. No JAX.

Every deployment serves the whole trace; then each window of arrivals is given to the one whose
requests of that window were done soonest, on average. So nothing that serves with one deployment
all along has a shorter mean, and hardly anything that changes: changes are free here, they are
known beforehand, and no deployment has to finish what another began.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from shiftjax.deploy.deployment import Deployment
from shiftjax.options import ConfigError
from shiftjax.sim.modelled import Target, sized_of
from shiftjax.sim.named import standard_deployments
from shiftjax.sim.planning import all_deployments
from shiftjax.sim.replay import Replay, RequestRecord

ORACLE = "oracle"
WINDOW_SECONDS = 60.0


@dataclass(frozen=True)
class Oracle:
    """Chooses among these, and all that it is compared with."""

    deployments: tuple[Deployment, ...]


def oracle_of(target: Target, **budgets: Any) -> Oracle:
    """Of all deployments that fit: every (dp, sp, tp), stages, and the policies of the modes."""
    standard = standard_deployments(target, **budgets)
    found = [standard["shift"], standard["cost"], *all_deployments(target, **budgets)]
    fitting = []
    for deployment in found:
        with suppress(ConfigError):
            sized_of(target, deployment)
            fitting.append(deployment)
    return Oracle(tuple(fitting))


def best_in_hindsight(replays: Sequence[Replay], seconds: float = WINDOW_SECONDS) -> Replay:
    """The requests of each window from the replay that was best in it, and the steps of that time.

    Of replays of one trace. `best` says in how many windows each was; whose requests are refused
    is best nowhere that another takes them.
    """
    windows = [_windows(replay.requests, seconds) for replay in replays]
    best = {
        window: min(range(len(replays)), key=lambda n: _rank(windows[n].get(window, ())))
        for window in sorted(set(chain.from_iterable(windows)))
    }
    wins = Counter(best.values())
    requests = chain.from_iterable(windows[n][window] for window, n in best.items())
    num_answered = sum(len(windows[n][window]) for window, n in best.items())
    num_all = len(replays[0].requests) + replays[0].num_refused
    steps = [
        step
        for n in wins
        for step in replays[n].steps
        if best.get(min(int(step.done / seconds), max(best))) == n
    ]
    (most, _), *_ = wins.most_common(1)
    return Replay(
        replace(replays[most].deployment, name=ORACLE),
        sorted(requests, key=lambda r: r.arrival),
        sorted(steps, key=lambda s: s.done),
        num_all - num_answered,
        mode_switches=0,
        num_preemptions=0,
        best={replays[n].deployment.name: count for n, count in wins.most_common()},
    )


def _windows(requests: Iterable[RequestRecord], seconds: float) -> dict[int, list[RequestRecord]]:
    """Requests by the window in which they came."""
    found: defaultdict[int, list[RequestRecord]] = defaultdict(list)
    for request in requests:
        found[int(request.arrival / seconds)].append(request)
    return found


def _rank(requests: Sequence[RequestRecord]) -> tuple[int, float]:
    """The less the better: more answered first, then a shorter mean."""
    return -len(requests), sum(r.completion for r in requests) / max(1, len(requests))
