"""The least devices that answer a load within limits, found by replay. No JAX.

For every machine, as many of its devices as a power of two, and every way to cut these into stages,
SP and TP, the closed form says what a replica can do at most. From there, the cheapest first,
replicas are added until a replay of each one's share of the load keeps the limits; what cannot be
cheaper than the best one found is not tried. Replicas are alike and share the load evenly, as
behind a router.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shiftjax.costs.crossing import shift_threshold
from shiftjax.deploy.deployment import Deployment
from shiftjax.options import ConfigError
from shiftjax.sim.estimate import Estimate, Workload, estimate
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.named import deploy
from shiftjax.sim.phase_rates import all_degrees
from shiftjax.sim.replay import replay
from shiftjax.sim.replay_metrics import summary
from shiftjax.sim.serve_command import serve_command
from shiftjax.sim.trace import TraceRequest, poisson, scale_rate

CLOSED_FORM_ERROR = 1.1  # of tokens per second; see tests/sim/test_planning.py
LEAST_REQUESTS = 200  # of a replay, so that a 90th percentile is one of 20
MOST_REPLICAS = 1024
IDLE = 0.2  # requests at once, on average: more replicas would make none of them quicker
SECONDS_PER_HOUR = 3600


class Goal(NamedTuple):
    """A load, in requests per second, and what this share of requests must get, in seconds."""

    rate: float
    ttft: float
    tpot: float
    percentile: int = 90


class Load(NamedTuple):
    """Mean lengths of requests, and those of one of so many replicas at a rate of all."""

    mean: Workload
    of_one: Callable[[float, int], Sequence[TraceRequest]]
    rate: float | None = None  # of all, by itself


class Trial(NamedTuple):
    """So many replicas of a deployment, and what the requests of one of them got."""

    target: Target  # the devices of one replica
    deployment: Deployment
    replicas: int
    rate: float  # requests per second of a replica
    ttft: float
    tpot: float
    tokens_per_second: float  # in and out, of a replica
    meets: bool

    @property
    def num_devices(self) -> int:
        """Of all replicas."""
        return self.replicas * self.target.machine.num_devices

    def cost(self, prices: Mapping[str, float]) -> float:
        """Dollars an hour of all devices; their number where there are no prices."""
        return _cost(self.target, self.replicas, prices)

    def row(self, prices: Mapping[str, float]) -> dict[str, Any]:
        """For a table or a file."""
        deployment = self.deployment
        row = {
            "machine": self.target.machine.name,
            **{name: getattr(deployment, name) for name in ("name", "pp", "sp", "tp")},
            "threshold": deployment.threshold if deployment.sp > 1 else None,
            "replicas": self.replicas,
            "gpus": self.num_devices,
            "rate_each": self.rate,
            "ttft_seconds": self.ttft,
            "tpot_seconds": self.tpot,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.target.machine.num_devices,
            "meets": self.meets,
        }
        if prices:
            per_hour = self.cost(prices)
            tokens = self.replicas * self.tokens_per_second * SECONDS_PER_HOUR
            row |= {"dollars_per_hour": per_hour, "dollars_per_million": per_hour / tokens * 1e6}
        return row


class Advice(NamedTuple):
    """All trials in order, and the best one that keeps the limits."""

    goal: Goal
    best: Trial | None
    trials: list[Trial]
    reasons: dict[str, str]  # why a deployment was not tried


def even_load(each: Workload, length_cv: float = 0.0) -> Load:
    """Requests that come independently of each other, alike or around these means (`poisson`)."""

    def of_one(rate: float, replicas: int) -> list[TraceRequest]:
        own, lengths = rate / replicas, (each.num_prompt_tokens, each.num_output_tokens)
        return poisson(own, 1.25 * LEAST_REQUESTS / own, *lengths, length_cv=length_cv)

    return Load(each, of_one)


def load_of(requests: Sequence[TraceRequest]) -> Load:
    """The requests of a trace, which replicas take in turn; quicker or slower for another rate.

    Raises ConfigError where they come at once, so that there is no rate.
    """
    span = requests[-1].arrival_seconds
    if span == 0:
        raise ConfigError(["all requests of this trace come at once: there is no rate to plan for"])
    natural = len(requests) / span
    mean = Workload(
        max(1, round(sum(r.num_prompt_tokens for r in requests) / len(requests))),
        max(1, round(sum(r.num_output_tokens for r in requests) / len(requests))),
    )

    def of_one(rate: float, replicas: int) -> list[TraceRequest]:
        return scale_rate(requests[::replicas], rate / natural)

    return Load(mean, of_one, natural)


def advise(
    targets: Sequence[Target],
    load: Load,
    goal: Goal,
    prices: Mapping[str, float],
    **budgets: Any,
) -> Advice:
    """Find the fewest devices, or with prices the least cost, that keep the limits.

    Of equals the one that was quicker. `prices` are of a device and hour, by machine, or empty.
    """
    reasons: dict[str, str] = {}
    candidates = sorted(
        (
            (_cost(target, least, prices), least, target, one)
            for whole in targets
            for target in _parts(whole)
            for one in _estimates(target, load.mean, goal, reasons, budgets)
            for least in [_least_replicas(one, load.mean, goal)]
        ),
        key=lambda candidate: (candidate[0], candidate[3].tpot_seconds),
    )
    trials: list[Trial] = []
    best: Trial | None = None
    for _, least, target, one in candidates:
        most = int(best.cost(prices) / _cost(target, 1, prices)) if best else MOST_REPLICAS
        found = list(_search(target, one.deployment, range(least, most + 1), load, goal, best))
        trials += found
        kept = [trial for trial in (best, *found) if trial is not None and trial.meets]
        best = min(kept, key=lambda trial: (trial.cost(prices), trial.tpot), default=None)
    return Advice(goal, best, trials, reasons)


def _parts(whole: Target) -> Iterator[Target]:
    """As many devices of a machine as a power of two, the most first."""
    for k in reversed(range(whole.machine.num_devices.bit_length())):
        yield replace(whole, machine=replace(whole.machine, num_devices=2**k))


def _estimates(
    target: Target,
    mean: Workload,
    goal: Goal,
    reasons: dict[str, str],
    budgets: Mapping[str, Any],
) -> Iterator[Estimate]:
    """One replica of all these devices in every way that may keep the limits."""
    for degrees in all_degrees(target):
        if degrees.dp > 1:
            continue
        where = f"{degrees.name} on {degrees.num_devices} of {target.machine.name}"
        try:
            deployment = deploy(target, degrees.name, **budgets)
        except ConfigError as error:
            reasons[where] = error.problems[0]
            continue
        one = estimate(target, deployment, mean)
        if not one.fits:
            reasons[where] = "has no room for the weights and one request"
        elif one.ttft_seconds > goal.ttft or one.tpot_seconds > goal.tpot:
            reasons[where] = (
                f"takes {one.ttft_seconds:.3g} s to the first token and {one.tpot_seconds:.3g} s a "
                "token where a request is alone"
            )
        else:
            if degrees.sp > 1 and "threshold" not in budgets:
                threshold = shift_threshold(cost_model(target, deployment))
                one = replace(one, deployment=replace(deployment, threshold=threshold))
            yield one


def _least_replicas(one: Estimate, mean: Workload, goal: Goal) -> int:
    """Fewer can't be enough, whatever the limits."""
    tokens = goal.rate * (mean.num_prompt_tokens + mean.num_output_tokens)
    return max(1, math.ceil(tokens / (CLOSED_FORM_ERROR * one.tokens_per_second)))


def _cost(target: Target, replicas: int, prices: Mapping[str, float]) -> float:
    price = prices[target.machine.name] if prices else 1.0
    return replicas * target.machine.num_devices * price


def _search(
    target: Target,
    deployment: Deployment,
    replicas: range,
    load: Load,
    goal: Goal,
    best: Trial | None,
) -> Iterator[Trial]:
    """Try numbers of replicas, of which more are never worse, for the least that keeps the limits.

    With a best one so far, what costs as much is tried first, and nothing more if that is too slow;
    else twice as many each time, until each has hardly ever a request.
    """
    if not replicas:
        return
    low, high = replicas[0], replicas[-1] if best else replicas[0]
    while True:
        trial = _tried(target, deployment, high, load, goal)
        yield trial
        if trial.meets:
            break
        busy = trial.rate * (trial.ttft + trial.tpot * load.mean.num_output_tokens)
        if best or busy < IDLE or high == replicas[-1]:
            return
        low, high = high + 1, min(2 * high, replicas[-1])
    while low < high:
        middle = (low + high) // 2
        trial = _tried(target, deployment, middle, load, goal)
        yield trial
        low, high = (low, middle) if trial.meets else (middle + 1, high)


def _tried(target: Target, deployment: Deployment, replicas: int, load: Load, goal: Goal) -> Trial:
    rate = goal.rate / replicas
    row = summary(replay(load.of_one(goal.rate, replicas), target, deployment))
    ttft, tpot = (row[f"{name}_p{goal.percentile}_seconds"] for name in ("ttft", "tpot"))
    ttft, tpot = math.inf if ttft is None else ttft, tpot or 0.0
    meets = row["failed"] == 0 and ttft <= goal.ttft and tpot <= goal.tpot
    each = row["tokens_per_second"]
    return Trial(target, deployment, replicas, rate, ttft, tpot, each, meets)


def in_words(advice: Advice, prices: Mapping[str, float]) -> str:
    """The advice in up to three sentences."""
    goal, best = advice.goal, advice.best
    limits = f"{goal.ttft:g} s to the first token and {goal.tpot:g} s a token"
    wanted = f"{goal.rate:g} requests/s, of which {goal.percentile}% get {limits}"
    if best is None:
        return f"Nothing that was tried answers {wanted}. {_closest(advice)}"
    deployment, machine = best.deployment, best.target.machine
    flags = f"--sp {deployment.sp} --tp {deployment.tp}"
    flags += f" --pp {deployment.pp}" if deployment.pp > 1 else ""
    flags += f" --shift-threshold {deployment.threshold}" if deployment.sp > 1 else ""
    how = f"{best.replicas} x {best.target.machine.num_devices} with {flags}"
    words = (
        f"Take {best.num_devices} devices of {machine.name} as {how}, for {wanted}. "
        f"At {best.rate:.3g} requests/s each, {goal.percentile}% then get "
        f"{best.ttft:.3g} s and {best.tpot:.3g} s."
    )
    if prices:
        row = best.row(prices)
        words += (
            f" That is ${row['dollars_per_hour']:,.2f} an hour, ${row['dollars_per_million']:.3g} "
            "for a million tokens in and out."
        )
    return f"{words}\nStart each: {serve_command(best.target.model.name, deployment)}"


def _closest(advice: Advice) -> str:
    """What came next to the limits, or why nothing was tried."""
    if not advice.trials:
        where, reason = next(iter(advice.reasons.items()))
        return f"The first of {len(advice.reasons)} reasons: {where} {reason}."
    goal = advice.goal
    trial = min(advice.trials, key=lambda t: max(t.ttft / goal.ttft, t.tpot / goal.tpot))
    return (
        f"Closest came {trial.replicas} x {trial.deployment.name} on {trial.target.machine.name} "
        f"with {trial.ttft:.3g} s and {trial.tpot:.3g} s."
    )
