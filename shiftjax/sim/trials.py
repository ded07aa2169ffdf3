"""So many servers under a load: what replays of one of them say about the limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shiftjax.deploy.deployment import Deployment
from shiftjax.sim.closed_loop import ClosedLoop
from shiftjax.sim.load import SEEDS, Limits, Load
from shiftjax.sim.modelled import Target
from shiftjax.sim.replay import Replay, replay
from shiftjax.sim.replay_metrics import summary
from shiftjax.sim.servers import Server

SECONDS_PER_HOUR = 3600


class Measured(NamedTuple):
    """What the requests of one server got in one replay."""

    ttft: float  # seconds, at the percentile of the limits
    tpot: float
    inside: float  # share of requests within both limits
    tokens_per_second: float  # in and out
    running: int  # sequences that decoded at once, at most, in a group
    refused: int  # requests that have no room in its KV cache


class Trial(NamedTuple):
    """So many servers, and what the requests of one of them got in replays by seed."""

    server: Server
    num_servers: int
    rate: float  # requests per second of a server, or its users
    measured: tuple[Measured, ...]
    meets: bool
    changed: str = ""  # what was changed to keep the limits, in words

    @property
    def target(self) -> Target:
        """The devices of one server."""
        return self.server.target

    @property
    def deployment(self) -> Deployment:
        """The engine of one server."""
        return self.server.deployment

    @property
    def num_devices(self) -> int:
        """Of all servers."""
        return self.num_servers * self.server.num_devices

    @property
    def ttft(self) -> float:
        """The mean of the seeds."""
        return _mean([each.ttft for each in self.measured])

    @property
    def tpot(self) -> float:
        """The mean of the seeds."""
        return _mean([each.tpot for each in self.measured])

    @property
    def inside(self) -> float:
        """The mean share of requests within both limits."""
        return _mean([each.inside for each in self.measured])

    @property
    def tokens_per_second(self) -> float:
        """In and out, of one server, in the first replay."""
        return self.measured[0].tokens_per_second

    @property
    def refused(self) -> int:
        """Requests that have no room, in the replay that has most of them."""
        return max(each.refused for each in self.measured)

    def cost(self, prices: Mapping[str, float]) -> float:
        """Dollars an hour of all devices; their number where there are no prices."""
        return cost_of(self.server, self.num_servers, prices)

    def row(self, prices: Mapping[str, float]) -> dict[str, Any]:
        """For a table or a file."""
        deployment = self.deployment
        row = {
            "machine": self.target.machine.name,
            **{name: getattr(deployment, name) for name in ("name", "dp", "pp", "sp", "tp")},
            "kv": deployment.formats.kv,
            "step": deployment.max_num_batched_tokens,
            "seqs": deployment.max_num_seqs,
            "servers": self.num_servers,
            "gpus": self.num_devices,
            f"{self.server.closed.load.word}_each": self.rate,
            "ttft_seconds": self.ttft,
            "tpot_seconds": self.tpot,
            "inside": self.inside,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.server.num_devices,
            "refused": self.refused,
            "seeds": len(self.measured),
            "meets": self.meets,
            "changed": self.changed,
        }
        if prices:
            per_hour = self.cost(prices)
            tokens = self.num_servers * self.tokens_per_second * SECONDS_PER_HOUR
            row |= {"dollars_per_hour": per_hour, "dollars_per_million": per_hour / tokens * 1e6}
        return row


def cost_of(server: Server, num_servers: int, prices: Mapping[str, float]) -> float:
    """Dollars an hour of all devices; their number where there are no prices."""
    price = prices[server.target.machine.name] if prices else 1.0
    return num_servers * server.num_devices * price


class Trials:
    """Replays servers under a load, remembers all trials, and counts the replays.

    A trial keeps the limits if the percentile of each latency does in every replay, and in the mean
    of the seeds with `margin` of the limit to spare.
    """

    def __init__(self, load: Load, limits: Limits, margin: float, most_replays: int):
        self.load, self.limits, self.margin = load, limits, margin
        self.all: list[Trial] = []
        self.num_replays, self.most_replays = 0, most_replays

    @property
    def is_over(self) -> bool:
        """Whether there have been as many replays as there may be."""
        return self.num_replays >= self.most_replays

    def first(self, server: Server, num_servers: int, rate: float, changed: str = "") -> Trial:
        """One replay of so many servers at a rate of all."""
        measured = self._measured(server, num_servers, rate, 0)
        keeps = self._keeps(measured)
        each = self.load.each(rate, num_servers)
        self.all.append(Trial(server, num_servers, each, (measured,), keeps, changed))
        return self.all[-1]

    def confirmed(self, trial: Trial, rate: float) -> Trial:
        """The same with all seeds, until one misses the limits; takes the place of the first."""
        found = trial
        while found.meets and len(found.measured) < SEEDS:
            seed = len(found.measured)
            measured = self._measured(found.server, found.num_servers, rate, seed)
            both = (*found.measured, measured)
            found = found._replace(measured=both, meets=self._keeps(measured))
        ratio = self.limits.ratio(found.ttft, found.tpot)
        found = found._replace(meets=found.meets and ratio <= 1 - self.margin)
        self.all = [found if each is trial else each for each in self.all]
        return found

    def _keeps(self, measured: Measured) -> bool:
        return not measured.refused and self.limits.ratio(measured.ttft, measured.tpot) <= 1

    def _measured(self, server: Server, num_servers: int, rate: float, seed: int) -> Measured:
        self.num_replays += 1
        return measure_at(self, server, num_servers, rate, seed)


def measure_at(
    trials: Trials, server: Server, num_servers: int, rate: float, seed: int = 0
) -> Measured:
    """A replay of one of so many servers at a rate of all, without a trial of it."""
    requests = trials.load.of_one(rate, num_servers, seed)
    run, num_new = replay(requests, server.target, server.deployment), 0
    if isinstance(requests, ClosedLoop):  # who came together at the start
        num_new = min(requests.users, len(run.requests) // 2)
    return measure(run, trials.limits, num_new)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure(run: Replay, limits: Limits, num_new: int = 0) -> Measured:
    """What a replay says about the limits; the first `num_new` requests do not count for them."""
    row, later = summary(run), replace(run, requests=run.requests[num_new:])
    of_later = summary(later) if num_new else row
    ttft, tpot = (of_later[f"{name}_p{limits.percentile}_seconds"] for name in ("ttft", "tpot"))
    inside = [
        request.ttft <= limits.ttft and (request.tpot or 0.0) <= limits.tpot
        for request in later.requests
    ]
    return Measured(
        math.inf if ttft is None else ttft,
        tpot or 0.0,
        sum(inside) / max(1, len(inside) + run.num_refused),
        row["tokens_per_second"],
        max((step.num_decodes for step in run.steps), default=0),
        row["failed"],
    )
