"""Which groups a fleet shall have. A policy sees demands and what groups hold, never JAX.

All of them let a request have the width that it needs: because its context fits no narrower group
(F20 of Flying Serving's mechanisms), because it asks (`min_width`), or because of its class (F19).
They differ in what they do with the rest of the load.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from shiftjax.control.policy import Policy
from shiftjax.control.request import Request
from shiftjax.costs.moves import MoveCosts
from shiftjax.costs.step import CostModel, Work
from shiftjax.parallel.fleet import Arrangement, bound, equal_groups, released
from shiftjax.parallel.grid import Group, Mode

FIRST_OUTPUT = 128.0  # tokens that sequences are thought to have made halfway, before any has ended
MEMORY_ENDED = 64  # sequences whose end makes this what was seen
MEMORY_SECONDS = 5.0  # for which what has come tells of what will come
LEAST_SPAN_SECONDS = 1.0  # that a rate is taken over
ROUNDS = 12  # of the iteration for the seconds of a token
ROUNDED_TOKENS = 64  # of prompts, for which predictions are kept
MARGIN = 0.05  # of the predicted seconds, which a change must save at least
HOLD_SWITCHES = 20  # times the seconds of a switch: for as long the groups concerned stay
LEAST_HOLD_SECONDS = 0.5
KV_SHARE = 0.9  # of the blocks of a group that a bind may fill


class Demand(NamedTuple):
    """A request that no group has yet."""

    needed_width: int
    num_prompt_tokens: int
    num_sequences: int


class GroupView(NamedTuple):
    """What a group has to do."""

    num_running: int
    num_waiting: int
    num_prompt_tokens: int  # that are not computed yet
    num_context_tokens: int
    num_output_tokens: int  # of what runs
    num_used_blocks: int
    num_blocks: int
    max_num_seqs: int
    needed_width: int  # the least width that all its requests can be served with


class FleetView(NamedTuple):
    """What a policy sees."""

    units: int
    arrangement: Arrangement
    groups: Mapping[Group, GroupView]  # of the arrangement
    queue: Sequence[Demand]  # its beginning
    num_unseen: int  # requests that come after
    now: float
    num_seen: int = 0  # requests that have come since the start

    @property
    def num_sequences(self) -> int:
        """All that run or wait."""
        held = sum(group.num_running + group.num_waiting for group in self.groups.values())
        return held + self.num_queued

    @property
    def num_queued(self) -> int:
        """Sequences that no group has; those of requests that are not seen count once."""
        return self.num_unseen + sum(demand.num_sequences for demand in self.queue)

    @property
    def num_queued_tokens(self) -> float:
        """Tokens of their prompts; those that are not seen are as long as the others."""
        seen = sum(demand.num_prompt_tokens for demand in self.queue)
        return seen * (1 + self.num_unseen / max(1, len(self.queue)))


class Wish(NamedTuple):
    """An arrangement, and why; `kind` of switching, if not the fleet's own."""

    arrangement: Arrangement
    reason: str
    kind: str | None = None


class Load:
    """What comes, as seen so far; what is longer ago than `MEMORY_SECONDS` has less weight."""

    def __init__(self) -> None:
        self.rate = 0.0  # requests per second
        self.mean_prompt = 0.0  # tokens
        self.mean_output = FIRST_OUTPUT  # tokens that what runs has made
        self._came = self._span = 0.0
        self._num_seen = self._num_ended = 0
        self._seen_at: float | None = None

    def see(self, view: FleetView) -> None:
        """Take note of what there is."""
        groups = view.groups.values()
        running = sum(group.num_running for group in groups)
        output = sum(group.num_output_tokens for group in groups)
        prompts = sum(group.num_context_tokens + group.num_prompt_tokens for group in groups)
        held = running + sum(group.num_waiting for group in groups)
        since = 0.0 if self._seen_at is None else view.now - self._seen_at
        kept = math.exp(-since / MEMORY_SECONDS)
        self._came = self._came * kept + view.num_seen - self._num_seen
        self._span = self._span * kept + since
        self._seen_at, self._num_seen = view.now, view.num_seen
        self.rate = self._came / max(self._span, LEAST_SPAN_SECONDS)
        if held:
            self.mean_prompt = max(0, prompts - output) / held
        ended = max(0, view.num_seen - view.num_sequences - self._num_ended)
        self._num_ended += ended
        if running:
            kept = math.exp(-ended / MEMORY_ENDED)
            self.mean_output = kept * self.mean_output + (1 - kept) * output / running


class FleetPolicy(Protocol):
    """Says which groups there shall be; `widens`: as wide as a request comes to need."""

    widens: ClassVar[bool]

    def width_for(self, request: Request) -> int:
        """The least width that a request shall have, as far as its class says."""
        ...

    def arrange(self, view: FleetView) -> Wish | None:
        """The groups that there shall be; None: as it is."""
        ...


@dataclass(frozen=True)
class FixedArrangement:
    """The same groups whatever comes: the control."""

    arrangement: Arrangement
    widens: ClassVar[bool] = False

    def width_for(self, request: Request) -> int:
        """Any."""
        return 1

    def arrange(self, view: FleetView) -> Wish | None:
        """As it was at the start."""
        return None


@dataclass(frozen=True)
class NeedPolicy:
    """Groups are as wide as their requests need: by context, by wish, by class.

    Requests of a class in `priorities` have a group of `bind_width` units.
    """

    widths: tuple[int, ...]
    priorities: frozenset[int] = frozenset()
    bind_width: int = 1
    widens: ClassVar[bool] = True

    def width_for(self, request: Request) -> int:
        """Of a class that binds: `bind_width`."""
        return self.bind_width if request.priority in self.priorities else 1

    def arrange(self, view: FleetView) -> Wish | None:
        """Bind for the first request that needs it; release what nobody needs."""
        return bind_for_need(view) or release_unneeded(view, self.widths)


@dataclass(frozen=True)
class LoadPolicy:
    """Few requests: one group; many: every unit on its own (F18). In between: as it is.

    Counts are of sequences, running or waiting, per unit.
    """

    widths: tuple[int, ...]
    bind_at: float
    release_at: float
    needs: NeedPolicy
    widens: ClassVar[bool] = True

    def width_for(self, request: Request) -> int:
        """What its class says."""
        return self.needs.width_for(request)

    def arrange(self, view: FleetView) -> Wish | None:
        """By the load per unit."""
        if wish := bind_for_need(view):
            return wish
        load = view.num_sequences / view.units
        if load >= self.release_at:
            return release_unneeded(view, self.widths, "load")
        widest = max(self.widths)
        wanted = equal_groups(view.units, widest)
        if load > self.bind_at or view.arrangement == wanted:
            return None
        return Wish(wanted, "quiet") if all(fits(view, group) for group in wanted) else None


@dataclass
class CostArrangement:
    """The arrangement of least predicted seconds until all that is there is done.

    Of a group with n sequences running, a waiting and P tokens of prompts to compute,

        J = [(n + a) P / X + (n + 2 a) h s + 2 h s e^2 / 2 m] / (1 - r)

    is what all of them together wait: for the prompts, computed at rate X; for their tokens, at s
    seconds of a step that decodes as many as the group takes at once, m, each in the mode that its
    own policy would choose; and, e of them that are more than m, for others to end. h is how many
    tokens what runs has made on average: in a steady state as many are to come, and twice as many
    of what waits. r is the share of time that prompts take which are still to come, at the rate at
    which they have come. Waiting work is spread over the units evenly; running work stays where it
    is. Of the binary tree of aligned groups the cheapest partition is taken, if it saves more than
    the moves that it takes and `margin`, and no unit changes groups within `hold_switches` times
    what its last change took.
    """

    widths: tuple[int, ...]
    costs: Mapping[int, CostModel]  # by width
    modes: Mapping[int, Sequence[Mode]]
    mode_policies: Mapping[int, Policy]  # by width
    moves: MoveCosts
    max_num_batched_tokens: int
    needs: NeedPolicy
    margin: float = MARGIN
    hold_switches: float = HOLD_SWITCHES
    widens: ClassVar[bool] = True
    _held_until: dict[int, float] = field(default_factory=dict)  # by unit
    _rates: dict[int, float] = field(default_factory=dict)  # of prompts, by width
    _prompts: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds by width, tokens
    _load: Load = field(default_factory=Load)

    def width_for(self, request: Request) -> int:
        """What its class says."""
        return self.needs.width_for(request)

    def arrange(self, view: FleetView) -> Wish | None:
        """Compare the partition of least seconds with what there is."""
        self._load.see(view)
        if wish := bind_for_need(view):
            return wish
        if not view.num_sequences:
            return None
        nodes = _Nodes(self, view, self._load)
        best = nodes.best_partition()
        if best is None or best == view.arrangement:
            return None
        switch = self._switch_seconds(view, best)
        changed = [group for group in best if group not in view.arrangement]
        units = [unit for g in changed for unit in range(g.first, g.first + g.width)]
        if any(self._held_until.get(unit, 0.0) > view.now for unit in units):
            return None
        saved = nodes.seconds_of(view.arrangement) - nodes.seconds_of(best)
        doubt = self.margin * nodes.seconds_of(view.arrangement)
        if saved <= doubt + switch * max(1, view.num_sequences):
            return None
        if self.hold_switches:
            hold = max(LEAST_HOLD_SECONDS, self.hold_switches * switch)
            self._held_until |= dict.fromkeys(units, view.now + hold)
        wider = max(g.width for g in best) > max(g.width for g in view.arrangement)
        return Wish(best, "quicker" if wider else "throughput")

    def prefill_rate(self, width: int) -> float:
        """Tokens per second of prompts in full steps."""
        if width not in self._rates:
            tokens = self.max_num_batched_tokens
            self._rates[width] = tokens / self._seconds(width, Work.prefill(tokens))
        return self._rates[width]

    def decode_seconds(self, width: int, num_sequences: int, context: int) -> float:
        """Seconds of a step that decodes so many sequences."""
        return self._seconds(width, Work.decode(max(1, num_sequences), max(1, context)))

    def token_seconds(
        self, width: int, num: float, context: float, load: Load, part: float, slots: float
    ) -> float:
        """Seconds between two tokens of `num` sequences in a group, while prompts keep coming.

        Its part of them comes at random, and no faster than `slots` per step are left by others:
        in a step of d seconds c = d * rate, so that a share 1 - exp(-c) of steps computes prompts,
        too. Such a step takes longer, and so more come in it: that is iterated.
        """
        step = seconds = self.decode_seconds(width, round(num), round(context))
        in_step = self.costs[width].engine.replicas_in_step  # everybody waits for anyone's prompts
        for _ in range(ROUNDS):
            come = min(load.rate * part * seconds, slots)
            if come <= 0:
                break
            tokens = num + load.mean_prompt * come / -math.expm1(-come)
            longer = max(step, self._prompt_seconds(width, tokens))
            share = -math.expm1(-come / part if in_step else -come)
            seconds = share * longer + (1 - share) * step
        return seconds

    def _prompt_seconds(self, width: int, num_tokens: float) -> float:
        """Seconds of a step of prompts, of at most as many tokens as steps may have."""
        size = min(
            self.max_num_batched_tokens, -(-int(num_tokens) // ROUNDED_TOKENS) * ROUNDED_TOKENS
        )
        key = width, size
        if key not in self._prompts:
            self._prompts[key] = self._seconds(width, Work.prefill(size))
        return self._prompts[key]

    def _seconds(self, width: int, work: Work) -> float:
        """Of a step of one of several equal groups, whose steps one host prepares in turn."""
        costs = self.costs[width]
        mode = self.mode_policies[width].mode_of(work, self.modes[width], 0, None)
        if costs.engine.replicas_in_step:
            return costs.seconds(mode, work)
        host = costs.host_seconds(work) * (max(self.widths) // width)
        device = costs.device_seconds(mode, work)
        return max(device, host) if costs.engine.overlaps else device + host

    def _switch_seconds(self, view: FleetView, new: Arrangement) -> float:
        """Seconds in which the changed groups do not step: moves, and the overlap that is lost."""
        seconds = 0.0
        for old, group in view.groups.items():
            if old not in new:
                others = [other for other in new if other.overlaps(old)]
                ways = max(max(o.width, old.width) // min(o.width, old.width) for o in others)
                width = max(o.width for o in (*others, old))
                of_unit = group.num_context_tokens // old.width
                engine = self.costs[width].engine
                host = engine.host(group.num_running, 2)
                seconds = max(seconds, self.moves.seconds(of_unit, ways) + host)
        return seconds


class _Nodes:
    """The groups of the binary tree over the units, and what each would take."""

    def __init__(self, policy: CostArrangement, view: FleetView, load: Load):
        self.policy, self.view, self.load = policy, view, load
        self._seconds: dict[Group, float] = {}
        self._best: dict[Group, tuple[float, Arrangement]] = {}
        self._num_queued = view.num_queued / view.units
        self._queued_tokens = view.num_queued_tokens / view.units

    def best_partition(self) -> Arrangement | None:
        """The cheapest arrangement that everybody fits into; None: there is none."""
        widest = max(self.policy.widths)
        parts = [self._best_of(group) for group in equal_groups(self.view.units, widest)]
        if any(seconds == float("inf") for seconds, _ in parts):
            return None
        return tuple(sorted(group for _, groups in parts for group in groups))

    def seconds_of(self, arrangement: Arrangement) -> float:
        """The sum over its groups."""
        return sum(self._of(group) for group in arrangement)

    def _best_of(self, node: Group) -> tuple[float, Arrangement]:
        if node not in self._best:
            choices: list[tuple[float, Arrangement]] = []
            if node.width in self.policy.widths and self._is_possible(node):
                choices.append((self._of(node), (node,)))
            if node.width > min(self.policy.widths):
                left, right = (self._best_of(half) for half in node.halves())
                choices.append((left[0] + right[0], left[1] + right[1]))
            best = min(choices, default=(float("inf"), ()), key=lambda choice: choice[0])
            self._best[node] = best
        return self._best[node]

    def _is_possible(self, node: Group) -> bool:
        view = self.view
        for group, held in view.groups.items():
            if group.overlaps(node) and node.width < held.needed_width <= group.width:
                return False
        return node in view.arrangement or fits(view, node)

    def _of(self, node: Group) -> float:
        if node not in self._seconds:
            self._seconds[node] = self._predict(node)
        return self._seconds[node]

    def _predict(self, node: Group) -> float:
        running = waiting = tokens = context = 0.0
        for group, held in self.view.groups.items():
            if group.overlaps(node):
                share = min(1.0, node.width / group.width)
                running += share * held.num_running
                context += share * held.num_context_tokens
                waiting += share * held.num_waiting
                tokens += share * held.num_prompt_tokens
        waiting += self._num_queued * node.width
        tokens += self._queued_tokens * node.width
        together = running + waiting
        if not together:
            return 0.0
        policy, load, part = self.policy, self.load, node.width / self.view.units
        most = min(held.max_num_seqs for held in self.view.groups.values())
        beyond, mean = max(0.0, together - most), (context + tokens) / together
        slots = most / (2 * load.mean_output) if beyond else math.inf
        token = policy.token_seconds(node.width, together - beyond, mean, load, part, slots)
        outputs = load.mean_output * token
        prompts = tokens / policy.prefill_rate(node.width) * (1 - beyond / max(waiting, 1.0))
        newcomers = load.rate * part * (prompts + outputs)
        queue = beyond * (2 * newcomers + beyond) / most
        return together * prompts + outputs * (running + 2 * waiting + queue)


def bind_for_need(view: FleetView) -> Wish | None:
    """A wide enough group for whom there is none: for what has outgrown its group, and the queue.

    For one of the queue it is where least is to do.
    """
    for group, held in view.groups.items():
        if held.needed_width > group.width:
            width = held.needed_width
            place = Group(group.first // width * width, width)
            # No other kind takes it along, and it would wait for others to give way.
            return Wish(bound(view.arrangement, place), "need", "move")
    for demand in view.queue:
        width = demand.needed_width
        if all(group.width < width for group in view.arrangement):
            places = [g for g in equal_groups(view.units, width) if _is_free(view, g)]
            if not places:
                return None
            place = min(places, key=lambda group: _work_around(view, group))
            return Wish(bound(view.arrangement, place), "need")
    return None


def release_unneeded(
    view: FleetView, widths: Iterable[int], reason: str = "unneeded"
) -> Wish | None:
    """The narrowest groups that all requests can be served with; None: there are no others."""
    arrangement = view.arrangement
    wanted = {demand.needed_width for demand in view.queue}
    for group in view.arrangement:
        needed = max(view.groups[group].needed_width, *(w for w in wanted if w <= group.width), 1)
        width = min(width for width in widths if width >= needed)
        if width < group.width:
            arrangement = released(arrangement, group, width)
    return None if arrangement == view.arrangement else Wish(arrangement, reason)


def fits(view: FleetView, node: Group) -> bool:
    """Whether all that runs on the units of a group could run in it, with room to grow."""
    inside = [(g, held) for g, held in view.groups.items() if g.overlaps(node)]
    num_running = sum(held.num_running for _, held in inside)
    blocks = sum(held.num_used_blocks * group.width for group, held in inside)
    least = min(held.num_blocks for _, held in inside)
    most = min(held.max_num_seqs for _, held in inside)
    return num_running <= most and blocks / node.width <= KV_SHARE * least


def _is_free(view: FleetView, place: Group) -> bool:
    """Whether no group that is as wide would be torn up."""
    return all(g.width < place.width for g in view.arrangement if g.overlaps(place))


def _work_around(view: FleetView, place: Group) -> tuple[int, int]:
    inside = [held for group, held in view.groups.items() if group.overlaps(place)]
    return (
        sum(held.num_running + held.num_waiting for held in inside),
        sum(held.num_context_tokens for held in inside),
    )
