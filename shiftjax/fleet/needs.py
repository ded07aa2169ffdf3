"""How wide a group each request of a fleet needs, and what a policy sees of all of them. No JAX."""

from collections.abc import Iterable, Sequence

from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.request import Request
from shiftjax.fleet.fleet_policy import Demand, FleetPolicy, FleetView, GroupView

GROWTH_TOKENS = 1024  # that a request without a limit has room for before it is served wider


class Needs:
    """Of requests by their limits, what they ask for, and what the policy says of their class."""

    def __init__(self, lanes: Iterable[Lane], policy: FleetPolicy, limits: RequestLimits):
        self._policy, self._limits = policy, limits
        num_tokens_of: dict[int, int] = {}
        for lane in lanes:
            blocks = lane.scheduler.tables.device
            num_tokens_of[lane.group.width] = blocks.num_usable_blocks * blocks.block_size
        self._num_tokens_of = sorted(num_tokens_of.items())  # by width
        self._units_hold_all = self._num_tokens_of[0][1] >= limits.max_model_len
        self.widest = max(num_tokens_of)

    def width_of(self, request: Request, num_tokens: int | None = None) -> int:
        """The least width that may serve a request that has come to so many tokens."""
        fitting = self.fitting_width(self.num_kv_tokens(request, num_tokens))
        return max(self._asked_width(request), fitting)

    def _asked_width(self, request: Request) -> int:
        """The least width that a request, or its class, is content with, as far as there is one."""
        asked = max(request.min_width, self._policy.width_for(request))
        return next((width for width, _ in self._num_tokens_of if width >= asked), self.widest)

    def num_kv_tokens(self, request: Request, num_tokens: int | None = None) -> int:
        """Tokens that a group must hold for one sequence of a request.

        One that has no limit of its own gets a wider group when it comes near the end of what it
        has, if groups come and go.
        """
        most_output, num_prompt_tokens = request.sampling.max_tokens, len(request.prompt_token_ids)
        most = self._limits.max_length(num_prompt_tokens, most_output) - 1
        if most_output is not None or not self._policy.widens:
            return most
        return min(most, (num_tokens or num_prompt_tokens) + GROWTH_TOKENS)

    def fitting_width(self, num_kv_tokens: int) -> int:
        """The least width whose pool holds so many tokens of one sequence."""
        for width, most in self._num_tokens_of:
            if most >= num_kv_tokens:
                return width
        return self.widest

    def view(
        self,
        lanes: Sequence[Lane],
        queue: Iterable[Request],
        num_queued: int,
        now: float,
        num_seen: int = 0,
    ) -> FleetView:
        """What a policy sees of the groups of an arrangement, and of the beginning of the queue."""
        groups = {lane.group: self._view_of(lane) for lane in lanes}
        waiting = [
            Demand(self.width_of(each), len(each.prompt_token_ids), each.sampling.n)
            for each in queue
        ]
        unseen = max(0, num_queued - len(waiting))
        units = sum(group.width for group in groups)
        return FleetView(units, tuple(groups), groups, waiting, unseen, now, num_seen)

    def _view_of(self, lane: Lane) -> GroupView:
        scheduler = lane.scheduler
        sequences = scheduler.running
        unfinished = sum(max(0, s.num_prompt_tokens - s.num_computed_tokens) for s in sequences)
        return GroupView(
            num_running=len(sequences),
            num_waiting=len(scheduler.waiting),
            num_prompt_tokens=scheduler.num_waiting_tokens + unfinished,
            num_context_tokens=sum(s.num_computed_tokens for s in sequences),
            num_output_tokens=sum(len(s.token_ids) - s.num_prompt_tokens for s in sequences),
            num_used_blocks=scheduler.num_used_blocks,
            num_blocks=scheduler.tables.device.num_usable_blocks,
            max_num_seqs=scheduler.config.max_num_seqs,
            needed_width=self.of_group(lane),
        )

    def of_group(self, lane: Lane) -> int:
        """The least width that all requests of a group can be served with."""
        needed = 1
        for siblings in lane.scheduler.requests.values():
            request = siblings[0].request
            if self._units_hold_all:
                needed = max(needed, self._asked_width(request))
            else:
                longest = max(len(sequence.token_ids) for sequence in siblings)
                needed = max(needed, self.width_of(request, longest))
        return needed
