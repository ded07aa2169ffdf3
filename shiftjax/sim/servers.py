"""The servers that could be bought for a load, and in closed form what each can do at most.

A *server* is one engine on some of a machine's devices: as many as a power of two, cut in every way
into stages, SP and TP, with the KV cache in one format. What cannot keep the limits even for a
request alone is left out, with the reason. Several groups in one engine, and fleets, are changes of
such a server (`variants.py`).

With a request rate r, B = r * prompt * seconds of a prompt token is the share of time that prompts
take. Decodes have the rest, and T is the mean time of their tokens:

    T = seconds of a step of r * answer * T decodes / (1 - B)
    mean time to the first token = alone + B / (1 - B) * half of what a prompt takes (one queue)

Below saturation the 90th percentile of replays is within a factor of 1.4 of this T, and above that
time to the first token (`tests/sim/test_servers.py`). So a rate is out of reach where T is 1.4
times its limit, or the time to the first token is above its limit, or it is 10% more than a full
server does (`estimate`). N users who think for Z seconds ask r = N / (Z + what a request takes)
times a second (Little's law): so many are out of reach with Z and the limits in place of the rest.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shiftjax.arch.formats import formats_of
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.options import ConfigError
from shiftjax.parallel.degrees import Degrees
from shiftjax.sim.estimate import estimate
from shiftjax.sim.load import Limits, Load
from shiftjax.sim.modelled import Target, cost_model, modes_of
from shiftjax.sim.named import FLEET, deploy
from shiftjax.sim.phase_rates import all_degrees

CLOSED_FORM_ERROR = 1.1  # of tokens per second; see tests/sim/test_planning.py
TPOT_ERROR = 1.4  # of the mean in closed form, beside a percentile of a replay
OF_GROUPS = ("dp=", "policy=")  # settings that a fleet says in its own way
HALVINGS = 24  # of a rate or a time that is looked for
MOST_SECONDS = 1e3  # a token that takes longer takes for ever
NARROW = "fp8"  # what a KV cache that is left open may be stored in


class Closed:
    """What a token takes on average in one group at a rate, and until the first, in closed form."""

    def __init__(self, costs: GroupCosts, deployment: Deployment, load: Load, alone: float):
        self._costs, self._modes = costs, modes_of(costs, deployment)
        self._stages, self._most = deployment.pp, deployment.max_num_seqs
        self.load, self._mean, self._alone = load, load.mean, alone
        prompt, size = load.new_share * load.mean.num_prompt_tokens, deployment.step_sizes[-1]
        work = Work.prefill(size)
        # In a pipeline the decodes of all stages wait for a chunk that passes through them.
        self.prompt_seconds = (
            prompt * min(costs.device_seconds(m, work) for m in self._modes) / size
        )

    def times(self, rate: float) -> tuple[float, float]:
        """(seconds to the first token, seconds a token) of a group; inf: it cannot keep up."""
        busy = rate * self.prompt_seconds
        if busy >= 1:
            return math.inf, math.inf
        first = self._alone + busy / (1 - busy) * self.prompt_seconds / 2
        low, high = 0.0, MOST_SECONDS
        for _ in range(HALVINGS):
            middle = (low + high) / 2 if low else high / 4
            is_less = self._step(rate, middle) / (1 - busy) <= middle
            low, high = (low, middle) if is_less else (middle, high)
        return first, high

    def under(self, each: float) -> tuple[float, float]:
        """The same under an amount of load, which may be users."""
        if self.load.think is None:
            return self.times(each)
        low, high = 0.0, each / max(self.load.think, self._alone)
        for _ in range(HALVINGS):
            rate = (low + high) / 2
            first, later = self.times(rate)
            is_less = self.load.amount(rate, first + later * self._mean.num_output_tokens) <= each
            low, high = (rate, high) if is_less else (low, rate)
        return self.times(low)

    def _step(self, rate: float, tpot: float) -> float:
        """Seconds of a step of as many decodes as a time a token comes to."""
        running = rate * self._mean.num_output_tokens * tpot / self._stages
        num = max(1, min(self._most, round(running)))
        work = Work.decode(num, self._mean.num_prompt_tokens + self._mean.num_output_tokens // 2)
        return min(self._costs.device_seconds(mode, work) for mode in self._modes)


class Server(NamedTuple):
    """One engine that could be bought."""

    target: Target  # its devices
    deployment: Deployment
    text: str  # the same as `named.py` reads it
    closed: Closed
    most_load: float  # requests/s, or users, that it may answer inside the limits, at best
    most_devices: int  # of its machine

    @property
    def num_devices(self) -> int:
        """Of one server."""
        return self.target.machine.num_devices

    @property
    def rank(self) -> int:
        """Of equal cost the least is taken: KV as it is computed, then KV in codes."""
        formats = self.target.formats
        return int(formats.kv != formats.activations)

    def ratio(self, each: float, limits: Limits) -> float:
        """How near it comes to the limits in closed form: what is to be tried first has least."""
        return limits.ratio(*self.closed.under(each))


class Field(NamedTuple):
    """All servers of a search, and why others are not among them."""

    servers: list[Server]
    reasons: dict[str, str]


def all_servers(
    targets: Sequence[Target],
    load: Load,
    limits: Limits,
    is_cache_open: bool,
    budgets: Mapping[str, Any],
) -> Field:
    """Every server of these machines that may keep the limits."""
    reasons: dict[str, str] = {}
    found = [
        server._replace(most_devices=whole.machine.num_devices)
        for whole in targets
        for target in _with_caches(whole, is_cache_open)
        for part in parts(target)
        for server in _servers(part, load, limits, reasons, budgets)
    ]
    return Field(found, reasons)


def changed(server: Server, budgets: Mapping[str, Any], settings: Mapping[str, Any]) -> Server:
    """The same server with other settings: with `dp` groups, on so many times the devices.

    With `fleet` its units form groups that come and go. Raises ConfigError.
    """
    target, text = server.target, server.text
    devices = server.num_devices * settings.get("dp", 1)
    target = replace(target, machine=replace(target.machine, num_devices=devices))
    if "fleet" in settings:
        _, *others = text.split(",")
        kept = (word for word in others if not word.startswith(OF_GROUPS))
        text = ",".join([f"{FLEET}:tp{server.deployment.tp}", *kept])
    else:
        text = ",".join([text, *(f"{name}={value}" for name, value in settings.items())])
    found = deploy(target, text, **budgets)
    degrees = Degrees(found.dp, found.pp, found.sp, found.tp)
    name = text.partition(",")[0] if found.widths else degrees.name
    return server._replace(target=target, deployment=replace(found, name=name), text=text)


def parts(whole: Target) -> Iterator[Target]:
    """As many devices of a machine as a power of two, the most first."""
    for k in reversed(range(whole.machine.num_devices.bit_length())):
        yield replace(whole, machine=replace(whole.machine, num_devices=2**k))


def _with_caches(target: Target, is_open: bool) -> list[Target]:
    """With the KV cache in every format that may be chosen: as activations are, or narrower."""
    formats = target.formats
    if not is_open:
        return [target]
    kinds = dict.fromkeys((formats.activations, NARROW))
    return [replace(target, formats=replace(formats, kv=formats_of(kv=kv).kv)) for kv in kinds]


def _servers(
    target: Target,
    load: Load,
    limits: Limits,
    reasons: dict[str, str],
    budgets: Mapping[str, Any],
) -> Iterator[Server]:
    """One server of all these devices in every way that may keep the limits."""
    policy = "threshold" if "threshold" in budgets or not target.engine.sizes_steps else "cost"
    for degrees in all_degrees(target):
        if degrees.dp > 1:
            continue
        where = f"{degrees.name} on {degrees.num_devices} of {target.machine.name}, KV "
        where += f"{target.formats.kv},"
        text = degrees.name + (f",policy={policy}" if degrees.sp > 1 else "")
        try:
            deployment = replace(deploy(target, text, **budgets), name=degrees.name)
            one = estimate(target, deployment, load.mean)
        except ConfigError as error:
            reasons[where] = error.problems[0]
            continue
        if not one.fits:
            room = max(0, one.deployment.longest_in(one.memory))
            need = f"one request of {load.mean.num_tokens:,} tokens"
            reasons[where] = f"has no room for the weights and {need}: for {room:,}"
        elif limits.ratio(one.ttft_seconds, one.tpot_seconds) > 1:
            reasons[where] = (
                f"takes {one.ttft_seconds:.3g} s to the first token and {one.tpot_seconds:.3g} s a "
                "token where a request is alone"
            )
        else:
            closed = Closed(cost_model(target, deployment), deployment, load, one.ttft_seconds)
            full = one.tokens_per_second / (load.new_share * load.mean.num_tokens)
            most = _most_rate(closed, limits, CLOSED_FORM_ERROR * full)
            most = load.amount(most, limits.life(load.mean.num_output_tokens))
            devices = target.machine.num_devices
            yield Server(target, deployment, text, closed, most, devices)


def _most_rate(closed: Closed, limits: Limits, most: float) -> float:
    """The highest rate that is not out of reach, `most` or less."""
    wide = limits._replace(tpot=TPOT_ERROR * limits.tpot)
    if wide.ratio(*closed.times(most)) <= 1:
        return most
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_within = wide.ratio(*closed.times(middle)) <= 1
        low, high = (middle, high) if is_within else (low, middle)
    return low
