"""The change between the phases of an engine, in virtual time: it takes what reloading takes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shiftjax.deploy.deployment import Deployment
from shiftjax.phases.resharding import Phase
from shiftjax.phases.switch_costs import Reload
from shiftjax.sim.devices import Clock, CostRunner
from shiftjax.sim.modelled import Target, reload_of


class Switch(NamedTuple):
    """One change of the phase; seconds on the virtual clock."""

    begin: float
    end: float
    phase: Phase  # that begins
    num_bytes: int  # of weights, over all devices


class CostExchange:
    """An `Exchange` that loads nothing: time passes until all devices have the other weights.

    The copies of KV that are on their way come first: those to the host use what the pools had,
    and only who is on the host will be found there.
    """

    def __init__(
        self,
        target: Target,
        phases: Mapping[Phase, Deployment],
        runners: Sequence[CostRunner],
        clock: Clock,
    ):
        self.switches: list[Switch] = []
        self._reloads: dict[Phase, Reload] = {p: reload_of(target, d) for p, d in phases.items()}
        self._dp = phases["prefill"].dp
        self._runners, self._clock = runners, clock

    def load(self, phase: Phase) -> None:
        """Let the time pass."""
        begin, reload = self._clock.now, self._reloads[phase]
        quiet = max(begin, *(runner.quiet_at for runner in self._runners))
        self._clock.now = quiet + reload.seconds
        num_bytes = self._dp * reload.replica_bytes
        self.switches.append(Switch(begin, self._clock.now, phase, num_bytes))
