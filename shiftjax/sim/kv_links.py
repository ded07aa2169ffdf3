"""KV that virtual devices of a group send to those of another one. No JAX."""

from collections.abc import Mapping

from shiftjax.core.lane import Lane
from shiftjax.costs.levels import send_seconds
from shiftjax.fleet.move_costs import MoveCosts
from shiftjax.sim.devices import Clock, Units


class KvLinks:
    """Sends KV from group to group in predicted seconds, see `sim/roles.py`.

    Devices gather what they send, and enter what they receive, between their steps: that takes the
    copies of a fleet's move in their memory. Between that it crosses the links beside all steps, as
    kernels or adapters do that read a peer's memory; a device sends, and receives, one after the
    other. The host dispatches it as it prepares a step of no sequences. That it leaves at once,
    while a step runs, is the best case: layers that are done could be sent before the last one is.
    """

    def __init__(
        self,
        costs: Mapping[int, MoveCosts],  # by `id` of a lane, as are the units
        units: Mapping[int, Units],
        clock: Clock,
        host_seconds: float,
    ):
        self._costs, self._units, self._clock = costs, units, clock
        self._host_seconds = host_seconds
        self._out: dict[int, float] = {}  # when the links of a group are free
        self._in: dict[int, float] = {}
        self.num_bytes = self.seconds = 0.0  # received by all devices; of busy links

    def __call__(self, source: Lane, target: Lane, num_blocks: int) -> float:
        """Begin to send so many blocks; returns the time at which they will have arrived."""
        clock, costs = self._clock, (self._costs[id(source)], self._costs[id(target)])
        clock.now += self._host_seconds
        gather = costs[0].side_seconds(num_blocks)
        self._units[id(source)].occupy(source.group, clock.now, gather)
        free = self._out.get(id(source), 0.0), self._in.get(id(target), 0.0)
        # Who has more of a token's bytes takes longest: the other side has more devices.
        each = max(num_blocks * cost.block_bytes for cost in costs)
        link = send_seconds(costs[0].machine.point_to_point, each) if num_blocks else 0.0
        arrives = max(clock.now + gather, *free) + link
        self._out[id(source)] = self._in[id(target)] = arrives
        self.num_bytes += num_blocks * costs[1].block_bytes * costs[1].layout.num_devices
        self.seconds += link
        return arrives

    def receive(self, target: Lane, num_blocks: int) -> None:
        """Let the target's devices enter what has arrived."""
        seconds = self._costs[id(target)].side_seconds(num_blocks)
        self._units[id(target)].occupy(target.group, self._clock.now, seconds)
