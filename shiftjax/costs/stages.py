"""Seconds of a step through pipeline stages: how long it takes, and how often one ends. No JAX.

A step passes all stages, and while it does, the others of the resident sequences fill the stages
behind it: with as many micro-batches as stages one ends every interval (Seesaw, arXiv 2503.06433).

    latency    the sum over the stages, and the host: what one request waits for a token if its
               micro-batch is alone
    interval   the slowest stage, or the host if that is slower: 1 / steps per second when full

A stage hands over its activations split over all its devices, so each pair of devices moves 1/P of
tokens x hidden x width bytes, and gathers inside the next stage (`collectives.entry_collectives`).
"""

from collections.abc import Sequence
from functools import cached_property

from shiftjax.costs.step import CostModel, Work
from shiftjax.parallel.grid import Mode


class PipelineCosts:
    """Predicts the steps of one group from the cost models of its stages, first to last."""

    def __init__(self, stages: Sequence[CostModel]):
        self.stages = list(stages)

    def stage_seconds(self, mode: Mode, work: Work) -> list[float]:
        """Seconds of a step in each stage: being given hidden states, but in the first; computing.

        That a transfer may hide behind the step before is left out of account.
        """
        computing = [stage.device_seconds(mode, work) for stage in self.stages]
        send = self.send_seconds(work)
        return [computing[0], *(seconds + send for seconds in computing[1:])]

    def latency_seconds(self, mode: Mode, work: Work) -> float:
        """Seconds of a step alone, from its plan to its results."""
        return sum(self.stage_seconds(mode, work)) + self._host_seconds(work)

    def interval_seconds(self, mode: Mode, work: Work) -> float:
        """Seconds between the ends of equal steps, with as many in flight as there are stages."""
        slowest, host = max(self.stage_seconds(mode, work)), self._host_seconds(work)
        return max(slowest, host) if self.stages[0].engine.overlaps else slowest + host

    def send_seconds(self, work: Work) -> float:
        """Seconds of the transfer across one boundary, by the quickest way."""
        first = self.stages[0]
        num_tokens, _ = first.size_of(work)
        width = first.model.hidden_size * first.formats.activation_bytes
        each = num_tokens * width / first.layout.num_devices
        ways = first.machine.point_to_point
        return min(way.latency_seconds + each / way.bytes_per_second for way in ways)

    def _host_seconds(self, work: Work) -> float:
        first = self.stages[0]
        return first.engine.host(work.num_sequences, self._num_devices)

    @cached_property
    def _num_devices(self) -> int:
        return sum(stage.layout.num_devices for stage in self.stages)
