"""Seconds of a step through pipeline stages: how long it takes, and how often one ends. No JAX.

A step passes all stages, and while it does, the others of the resident sequences fill the stages
behind it: with as many micro-batches as stages one ends every interval (Seesaw, arXiv 2503.06433).

    latency    the sum over the stages, and the host: what one request waits for a token if its
               micro-batch is alone
    interval   1 / steps per second when full. Each stage and the host take one step at a time, so
               it is at least the slowest of them; and at most S steps of S stages are in flight,
               one more where the engine prepares the next while they are, so it is at least the
               latency over these. The larger of the bounds is reached: a closed loop of servers
               with fixed times has no other.

An engine that does not overlap thus hides its host behind the other stages, but for 1/S of it.
A stage hands over its activations split over all its devices, so each pair of devices moves 1/P of
tokens x hidden x width bytes, and gathers inside the next stage (`collectives.entry_collectives`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

from shiftjax.costs.levels import send_seconds
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.costs.step_costs import CostModel, StepCost
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout


@runtime_checkable
class GroupCosts(Protocol):
    """Predicts the steps of a group: a `CostModel` where it has one stage, else `PipelineCosts`.

    Policies, prices of drafts, plans and the simulator ask this and know nothing of stages.
    """

    @property
    def stages(self) -> Sequence[CostModel]:
        """The cost models of the pipeline stages, first to last."""
        ...

    @property
    def machine(self) -> Machine:
        """The machine whose constants the predictions use."""
        ...

    @property
    def engine(self) -> EngineOverhead:
        """The host and launch overhead of the engine that the predictions assume."""
        ...

    @property
    def layout(self) -> Layout:
        """How a stage uses its devices: modes and heads are the same in all stages."""
        ...

    def seconds(self, mode: Mode, work: Work) -> float:
        """Seconds between the ends of equal steps in a stream of them."""
        ...

    def serial_seconds(self, mode: Mode, work: Work) -> float:
        """Seconds of a step alone, from its plan to its results: nothing hides the host."""
        ...

    def paced_seconds(
        self, mode: Mode, work: Work, num_batches: int, num_guessing: int = 0, *, is_hidden: bool
    ) -> float:
        """Seconds between the ends of equal steps of so many micro-batches, which take turns.

        Each has its own step committed before its next is planned, unless that `is_hidden`. A
        speculator guesses for `num_guessing` sequences after each.
        """
        ...

    def device_seconds(self, mode: Mode, work: Work) -> float:
        """Seconds of a step on the devices, from the first stage to the last."""
        ...

    def stage_seconds(self, mode: Mode, work: Work) -> list[float]:
        """`device_seconds` by stage: receiving hidden states (but in the first), then computing."""
        ...

    def host_seconds(self, work: Work) -> float:
        """Seconds that the host needs to prepare and finish a step."""
        ...

    def mode_seconds(self, mode: Mode, size: tuple[int, int]) -> float:
        """Device seconds of a step of this size but for attention, which no mode changes."""
        ...

    def size_of(self, work: Work) -> tuple[int, int]:
        """(tokens, rows) that the step is padded to."""
        ...

    def guess_seconds(self, num_sequences: int) -> float:
        """Seconds that the guesses of a speculator for so many sequences add to a step."""
        ...

    def breakdown(self, mode: Mode, work: Work) -> StepCost:
        """Return `serial_seconds` by kind: products, attention, collectives, launches, host."""
        ...


class PipelineCosts:
    """Predicts the steps of one group from the cost models of its stages, first to last."""

    def __init__(self, stages: Sequence[CostModel]):
        self.stages = list(stages)
        first = self.stages[0]
        self.machine, self.engine, self.layout = first.machine, first.engine, first.layout

    def stage_seconds(self, mode: Mode, work: Work) -> list[float]:
        """Seconds of a step in each stage: being given hidden states, but in the first; computing.

        That a transfer may hide behind the step before is left out of account.
        """
        computing = [stage.device_seconds(mode, work) for stage in self.stages]
        send = self.send_seconds(work)
        return [computing[0], *(seconds + send for seconds in computing[1:])]

    def device_seconds(self, mode: Mode, work: Work) -> float:
        """Seconds of a step in all stages, one after the other."""
        return sum(self.stage_seconds(mode, work))

    def serial_seconds(self, mode: Mode, work: Work) -> float:
        """The latency: seconds of a step alone, from its plan to its results."""
        return self.device_seconds(mode, work) + self.host_seconds(work)

    def seconds(self, mode: Mode, work: Work) -> float:
        """The interval: seconds between the ends of equal steps, with as many in flight as fit."""
        stages, host = self.stage_seconds(mode, work), self.host_seconds(work)
        in_flight = len(stages) + self.engine.overlaps
        return max(*stages, host, (sum(stages) + host) / in_flight)

    def paced_seconds(
        self, mode: Mode, work: Work, num_batches: int, num_guessing: int = 0, *, is_hidden: bool
    ) -> float:
        """The interval of few micro-batches: a step of each begins when its last tokens are known.

        What is hidden is the host; a token has passed all stages in any case.
        """
        *stages, last = self.stage_seconds(mode, work)
        stages.append(last + (self.guess_seconds(num_guessing) if num_guessing else 0.0))
        host = self.host_seconds(work)
        turn = sum(stages) + (0.0 if is_hidden else host)
        return max(*stages, host, turn / num_batches)

    def send_seconds(self, work: Work) -> float:
        """Seconds of the transfer across one boundary, by the quickest way."""
        first = self.stages[0]
        num_tokens, _ = first.size_of(work)
        return self._send_seconds(num_tokens)

    def host_seconds(self, work: Work) -> float:
        """Seconds that the host needs to prepare, launch and finish a step."""
        layers = max(stage.model.num_layers for stage in self.stages)  # each has a host process
        launches = self.engine.eager_seconds(work.num_tokens, layers)
        return launches + self.engine.host(work.num_sequences, self._num_devices)

    def mode_seconds(self, mode: Mode, size: tuple[int, int]) -> float:
        """Seconds in all stages but for attention: where stages are alike, S times an interval."""
        sends = (len(self.stages) - 1) * self._send_seconds(size[0])
        return sends + sum(stage.mode_seconds(mode, size) for stage in self.stages)

    def size_of(self, work: Work) -> tuple[int, int]:
        """(tokens, rows) that the step is padded to, in all stages."""
        return self.stages[0].size_of(work)

    def guess_seconds(self, num_sequences: int) -> float:
        """Those of the last stage, which has the hidden states."""
        return self.stages[-1].guess_seconds(num_sequences)

    def breakdown(self, mode: Mode, work: Work) -> StepCost:
        """The latency by what it is spent on; what is sent counts with the collectives."""
        parts = [stage.breakdown(mode, work) for stage in self.stages]
        total = StepCost(*map(sum, zip(*parts, strict=True)))
        sends = (len(self.stages) - 1) * self.send_seconds(work)
        return total._replace(collectives=total.collectives + sends, host=self.host_seconds(work))

    def _send_seconds(self, num_tokens: int) -> float:
        first = self.stages[0]
        width = first.model.hidden_size * first.formats.activation_bytes
        each = num_tokens * width / first.layout.num_devices
        return send_seconds(self.machine.hops, each)

    @cached_property
    def _num_devices(self) -> int:
        return sum(stage.layout.num_devices for stage in self.stages)
