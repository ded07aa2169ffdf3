"""What is changed of servers that miss the limits by little. No JAX.

Each row says when a change can help, by what the trial missed, and which settings it changes.
Settings that the user gave stay. A row also says from which distance its change has brought servers
within the limits: each trial takes time. Changes add up. Engines that choose the size of each step
by its cost gain little from another bound; others depend on it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shiftjax.options import ConfigError
from shiftjax.sim.load import Limits
from shiftjax.sim.servers import changed
from shiftjax.sim.trials import Trial, Trials
from shiftjax.targets import NO_TARGETS

NEAR = 1.15  # times the limits
FAR = 2.5
LEAST_STEP, LEAST_SEQUENCES, MOST_SEQUENCES = 2048, 16, 1024
LEAST_UNITS = 4  # of a fleet: two have one arrangement beside that of all
FULL = 0.95  # of the sequences that may run: others waited for a place


Settings = Mapping[str, Any]


class Variant(NamedTuple):
    """A change of settings: when it can help, and to what; None: nothing is left to change."""

    helps: Callable[[Trial, Limits], bool]
    settings: Callable[[Trial, Limits], Settings | None]
    in_words: str


def _is_near(trial: Trial, limits: Limits) -> bool:
    return limits.ratio(trial.ttft, trial.tpot) <= NEAR


def _is_late(trial: Trial, limits: Limits) -> bool:
    """Whether only the tokens after the first come too late, by little or by sizes of steps."""
    reach = NEAR if trial.target.engine.sizes_steps else FAR
    return trial.ttft <= limits.ttft and limits.tpot < trial.tpot <= reach * limits.tpot


def _waits_for_a_place(trial: Trial, limits: Limits) -> bool:
    running = max(each.running for each in trial.measured)
    is_late = trial.ttft > limits.ttft and trial.tpot <= limits.tpot
    return is_late and running >= FULL * trial.deployment.max_num_seqs


def _targets(trial: Trial, limits: Limits) -> Settings | None:
    """The limits, as what sizes of steps are chosen for."""
    deployment = trial.deployment
    chooses = trial.target.engine.sizes_steps and deployment.pp == 1
    if not chooses or deployment.targets != NO_TARGETS:
        return None
    return {"target_ttft": limits.ttft, "target_tpot": limits.tpot}


def _smaller_step(trial: Trial, _: Limits) -> Settings | None:
    half = trial.deployment.max_num_batched_tokens // 2
    return {"max_num_batched_tokens": half} if half >= LEAST_STEP else None


def _fewer(trial: Trial, _: Limits) -> Settings | None:
    running = max(each.running for each in trial.measured)
    fewer = 1 << max(0, (running - 1).bit_length() - 1)
    return {"max_num_seqs": fewer} if fewer >= LEAST_SEQUENCES else None


def _more(trial: Trial, _: Limits) -> Settings | None:
    more = 2 * trial.deployment.max_num_seqs
    most = min(MOST_SEQUENCES, trial.deployment.max_num_batched_tokens)
    return {"max_num_seqs": more} if more <= most else None


def _groups(trial: Trial, _: Limits) -> Settings | None:
    """Groups of one engine: as many of the servers as a machine has devices for."""
    server, found = trial.server, 1
    if server.deployment.widths or server.deployment.dp > 1:
        return None
    while (
        trial.num_servers % (2 * found) == 0
        and 2 * found * server.num_devices <= server.most_devices
    ):
        found *= 2
    return {"dp": found} if found > 1 else None


def _fleet(trial: Trial, _: Limits) -> Settings | None:
    """Groups that come and go, of the same units: on one host, in an engine that chooses sizes."""
    deployment, machine = trial.deployment, trial.target.machine
    plain = deployment.pp == 1 and not deployment.widths
    has_units = deployment.sp * deployment.dp >= LEAST_UNITS and machine.num_hosts == 1
    return {"fleet": True} if plain and has_units and trial.target.engine.sizes_steps else None


VARIANTS = (
    Variant(_is_near, _targets, "targets of {target_ttft:g} s and {target_tpot:g} s"),
    Variant(_is_near, _groups, "one engine of {dp} groups"),
    Variant(_is_late, _smaller_step, "steps of up to {max_num_batched_tokens:,} tokens"),
    Variant(_is_late, _fewer, "no more than {max_num_seqs} sequences at once"),
    Variant(_waits_for_a_place, _more, "up to {max_num_seqs} sequences at once"),
    Variant(_is_near, _fleet, "as a fleet"),
)


class Changes:
    """Tries what the table says for trials that missed."""

    def __init__(self, trials: Trials, budgets: Mapping[str, Any]):
        self.trials, self._budgets = trials, budgets
        limits, share = trials.limits, 1 - trials.margin
        self._limits = limits._replace(ttft=share * limits.ttft, tpot=share * limits.tpot)

    def kept(self, trial: Trial, rate: float) -> Trial | None:
        """The first changed server that keeps the limits at this rate; None: there is none.

        A change that brought the trial nearer to its limits stays, and is made once more.
        """
        if trial.refused:
            return None
        base = trial
        for variant in VARIANTS:
            found = self._tried(variant, base, rate)
            while found is not None and not found.meets and self._nearer(found, base):
                base, found = found, self._tried(variant, found, rate)
            if found is not None and found.meets:
                return found
        return None

    def _nearer(self, found: Trial, base: Trial) -> bool:
        ratio = self.trials.limits.ratio
        return ratio(found.ttft, found.tpot) < ratio(base.ttft, base.tpot)

    def _tried(self, variant: Variant, trial: Trial, rate: float) -> Trial | None:
        """What became of a change; None: it cannot help, or cannot be had."""
        settings = variant.settings(trial, self.trials.limits)
        if settings is None or settings.keys() & self._budgets.keys() or self.trials.is_over:
            return None
        if not variant.helps(trial, self._limits):
            return None
        num = trial.num_servers // settings.get("dp", 1)
        words = variant.in_words.format(**settings)
        words = f"{trial.changed}, {words}" if trial.changed else words
        try:
            server = changed(trial.server, self._budgets, settings)
            found = self.trials.first(server, num, rate, words)
        except ConfigError:  # a fleet may have no room for what its widths share
            return None
        return self.trials.confirmed(found, rate) if found.meets else found
