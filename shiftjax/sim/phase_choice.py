"""Which degrees suit a batch: static ones, or a pair of them for prompts and for decodes. No JAX.

`choose_phases` compares all in closed form (`phase_rates.py`) and takes a pair only where it is
predicted to be `LEAST_GAIN` quicker than the best static deployment, switches included.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shiftjax.options import ConfigError
from shiftjax.parallel.degrees import Degrees
from shiftjax.phases.switch_costs import check_host_links
from shiftjax.sim.modelled import Target, why_not_stored
from shiftjax.sim.named import deploy
from shiftjax.sim.phase_rates import (
    Batch,
    Phased,
    Rates,
    all_degrees,
    phased,
    rates_of,
    static_seconds,
)

LEAST_GAIN = 0.03  # of the time; less is not worth trusting the model


class Candidate(NamedTuple):
    """One way to compute a batch; seconds are predicted."""

    prefill: Degrees
    decode: Degrees  # the same: a static deployment
    seconds: float  # of the whole batch
    phases: Phased | None = None  # None: static

    @property
    def name(self) -> str:
        """As `--phases` spells it, or the degrees of a static deployment."""
        if self.phases is None:
            return self.prefill.name
        return f"{self.prefill.name}:{self.decode.name}"


class PhaseChoice(NamedTuple):
    """All candidates that fit, the quickest first, and which one to take."""

    ranked: tuple[Candidate, ...]
    static: Candidate  # the best of those without phases
    chosen: Candidate
    break_even: float  # requests a cycle that pay for its switches in the best pair; inf: none do
    reason: str  # one sentence

    def lines(self, most: int = 5) -> list[str]:
        """For people: the quickest few, and why which is taken."""
        shown = list(self.ranked[:most])
        shown += [one for one in (self.static,) if one not in shown]
        return [*(_line(one) for one in shown), self.reason]


def choose_phases(
    target: Target, lengths: Sequence[tuple[int, int]], host_bytes: int, **budgets: Any
) -> PhaseChoice:
    """The degrees to compute a batch in.

    Args:
        target: the model, the machine with as many devices as there are to use, the overhead of
            the engine, and number formats.
        lengths: (prompt tokens, most output tokens) of every request.
            Answers that end early make decodes shorter than that.
        host_bytes: of host memory for parked KV; 0: static deployments alone are compared.
        budgets: of a group, as `deploy` takes them: `max_num_seqs`, `max_num_batched_tokens`,
            `block_size`, `memory_fraction`, `max_model_len`.

    Raises:
        ConfigError: no degrees hold the model and a sequence, or phases are asked for and nobody
            knows the machine's links to its host.
    """
    if not lengths:
        raise ConfigError(["there is no request to choose degrees for"])
    batch = Batch.of(lengths)
    rates = dict(_rates(target, batch, budgets))
    static = [Candidate(d, d, static_seconds(each, batch)) for d, each in rates.items()]
    static = sorted(static, key=_seconds_of)
    if not static:
        name, machine = target.model.name, target.machine.name
        raise ConfigError([f"{name} does not fit {machine} in any number of stages"])
    if host_bytes:
        check_host_links(target.machine)
    pairs = _pairs(rates, batch, host_bytes)
    best, quickest = static[0], min(pairs, key=_seconds_of, default=None)
    chosen, even = best, math.inf
    if quickest is not None:
        even = _break_even(quickest, best, batch)
        if quickest.seconds < (1 - LEAST_GAIN) * best.seconds:
            chosen = quickest
    ranked = tuple(sorted(static + pairs, key=_seconds_of))
    return PhaseChoice(ranked, best, chosen, even, _reason(chosen, best, quickest, even, batch))


def _rates(
    target: Target, batch: Batch, budgets: dict[str, Any]
) -> Iterator[tuple[Degrees, Rates]]:
    """Of all that fit."""
    for degrees in all_degrees(target):
        kept = budgets | {"frees_blocks": False}  # phases exchange whole blocks
        deployment = deploy(target, degrees.name, **kept)
        if why_not_stored(target, deployment):
            continue
        rates = rates_of(target, deployment, batch)
        if rates is not None:
            yield degrees, rates


def _pairs(rates: dict[Degrees, Rates], batch: Batch, host_bytes: int) -> list[Candidate]:
    """Pairs of equal dp whose change moves weights: else a static deployment does the same."""
    found = []
    for first, prefill in rates.items():
        for second, decode in rates.items():
            if first.dp != second.dp or first.pp == second.pp == 1 or first == second:
                continue
            phases = phased(prefill, decode, batch, host_bytes)
            if phases is not None:
                found.append(Candidate(first, second, phases.seconds, phases))
    return found


def _break_even(pair: Candidate, static: Candidate, batch: Batch) -> float:
    """Requests a cycle from which on the pair is quicker than the best static deployment."""
    assert pair.phases is not None
    computing = pair.phases.prefill_seconds + pair.phases.decode_seconds
    saved = (static.seconds - computing) / batch.num_requests
    return 2 * pair.phases.one_switch / saved if saved > 0 else math.inf


def _reason(
    chosen: Candidate,
    static: Candidate,
    pair: Candidate | None,
    break_even: float,
    batch: Batch,
) -> str:
    if pair is None or pair.phases is None:
        return f"{chosen.name}: no two configurations fit, with a prompt on the host"
    gain = static.seconds / pair.seconds - 1
    cycle = f"a cycle has {pair.phases.cycle:,} requests"
    pays = "no number pays" if math.isinf(break_even) else f"{math.ceil(break_even):,} pay"
    words = f"{cycle}, and {pays} for its switches of {pair.phases.one_switch:.2f} s"
    if chosen is pair:
        return f"{chosen.name}: {gain:.0%} quicker than {static.name}; {words}"
    if gain > 0:
        words = f"less than {LEAST_GAIN:.0%} may be an error of the model; {words}"
    return f"{chosen.name}, without phases: {pair.name} is predicted {gain:+.1%}; {words}"


def _line(one: Candidate) -> str:
    if one.phases is None:
        return f"{one.name}: {one.seconds:,.1f} s"
    phases = one.phases
    parts = f"{phases.prefill_seconds:,.1f} s of prompts, {phases.decode_seconds:,.1f} s of decodes"
    switching = f"{phases.num_switches} switches of {phases.one_switch:,.2f} s"
    return f"{one.name}: {one.seconds:,.1f} s ({parts}, {switching})"


def _seconds_of(one: Candidate) -> float:
    return one.seconds
