"""Groups by predicted seconds: the cost policy of a fleet. No JAX."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from shiftjax.core.request import Request
from shiftjax.fleet.fleet_policy import FleetView, NeedPolicy, Wish, bind_for_need, fits
from shiftjax.fleet.move_costs import MoveCosts
from shiftjax.fleet.step_prices import Coming, StepPrices
from shiftjax.parallel.arrangements import Arrangement, equal_groups
from shiftjax.parallel.grid import Group

FIRST_OUTPUT = 128.0  # tokens that sequences are thought to have made halfway, before any has ended
MEMORY_ENDED = 64  # sequences whose end makes this what was seen
MEMORY_SECONDS = 5.0  # for which what has come tells of what will come
LEAST_SPAN_SECONDS = 1.0  # that a rate is taken over
BACKLOG_SECONDS = 2.0  # of prompts that wait: with more, what is there counts, not what may come
COMPARE_SECONDS = 0.05  # between comparisons: one takes about half a millisecond of the host
MARGIN = 0.05  # of the predicted seconds, which a change must save at least
HOLD_SWITCHES = 20  # times the seconds of a switch: for as long the groups concerned stay
LEAST_HOLD_SECONDS = 0.5  # for as long they stay at least; twice as long where that was soon after
MOST_HOLD_SECONDS = 8.0  # another change, but no longer than this


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


@dataclass
class CostArrangement:
    """The arrangement of least predicted seconds until all that is there is done.

    Of a group with n sequences running, a waiting and prompts to compute for D seconds,

        W = (n + a) D + (n + 2 a) h t + (2 f + e) e h t / m
        L = D + 2 h t (1 + e / m)
        J = W + (n + a) (L + p)

    W is what they wait, all together: for the prompts; for their tokens, every t seconds; and for
    others to end, if they are e more than the m that the group takes at once, as do the f that will
    have come by then. L is when the last of them ends: it counts as much as the mean, so that a
    batch ends soon, too. p is what one more prompt takes: who comes next waits for it. D and t are
    those of the sizes of steps that the group would choose (`StepPrices`). h is how many tokens
    what runs has made on average: in a steady state as many are to come, and twice as many of what
    waits. While prompts wait for more than `BACKLOG_SECONDS` of all devices nothing is taken to
    come: nobody would keep up, and who is done with the backlog first serves best. Where e > 0,
    whoever ends makes room for one of them. Waiting work is spread over the units evenly;
    running work stays where it is. Of the binary tree of aligned groups the cheapest partition is
    taken, if it saves more than the moves that it takes and `margin`. A unit then stays in its
    group for `hold_switches` times what the change took, at least `LEAST_HOLD_SECONDS`, and longer
    each time that changes follow each other.
    """

    widths: tuple[int, ...]
    steps: StepPrices
    moves: MoveCosts
    needs: NeedPolicy
    margin: float = MARGIN
    hold_switches: float = HOLD_SWITCHES
    widens: ClassVar[bool] = True
    _held_until: dict[int, float] = field(default_factory=dict)  # by unit
    _changed_at: float = float("-inf")
    _compared_at: float = float("-inf")
    _hold: float = 0.0  # seconds
    _load: Load = field(default_factory=Load)

    def rule(self) -> str:
        """By prediction."""
        return "groups change when others are predicted to be quicker for what is there"

    def width_for(self, request: Request) -> int:
        """What its class says."""
        return self.needs.width_for(request)

    def arrange(self, view: FleetView) -> Wish | None:
        """Compare the partition of least seconds with what there is."""
        self._load.see(view)
        if wish := bind_for_need(view):
            return wish
        if not view.num_sequences or view.now - self._compared_at < COMPARE_SECONDS:
            return None
        self._compared_at = view.now
        nodes = Nodes(self, view, self._load)
        best = nodes.best_partition()
        if best is None or best == view.arrangement:
            return None
        switch = self.switch_seconds(view, best)
        changed = [group for group in best if group not in view.arrangement]
        units = [unit for g in changed for unit in range(g.first, g.first + g.width)]
        if any(self._held_until.get(unit, 0.0) > view.now for unit in units):
            return None
        saved = nodes.seconds_of(view.arrangement) - nodes.seconds_of(best)
        doubt = self.margin * nodes.seconds_of(view.arrangement)
        if saved <= doubt + switch * max(1, view.num_sequences):
            return None
        if self.hold_switches:
            soon = view.now - self._changed_at < MEMORY_SECONDS
            self._hold = min(2 * self._hold, MOST_HOLD_SECONDS) if soon else LEAST_HOLD_SECONDS
            hold = max(self._hold, self.hold_switches * switch)
            self._held_until |= dict.fromkeys(units, view.now + hold)
            self._changed_at = view.now
        wider = max(g.width for g in best) > max(g.width for g in view.arrangement)
        return Wish(best, "quicker" if wider else "throughput")

    def switch_seconds(self, view: FleetView, new: Arrangement) -> float:
        """Seconds in which the changed groups do not step: moves, and the overlap that is lost."""
        seconds = 0.0
        for old, group in view.groups.items():
            if old not in new:
                others = [other for other in new if other.overlaps(old)]
                ways = max(max(o.width, old.width) // min(o.width, old.width) for o in others)
                width = max(o.width for o in (*others, old))
                of_unit = group.num_context_tokens // old.width
                engine = self.steps.costs[width].engine
                host = engine.host(group.num_running, 2)
                seconds = max(seconds, self.moves.seconds(of_unit, ways) + host)
        return seconds


class Nodes:
    """The groups of the binary tree over the units, and what each would take."""

    def __init__(self, policy: CostArrangement, view: FleetView, load: Load):
        self.policy, self.view, self.load = policy, view, load
        self._seconds: dict[Group, float] = {}
        self._best: dict[Group, tuple[float, Arrangement]] = {}
        self._num_queued = view.num_queued / view.units
        self._queued_tokens = view.num_queued_tokens / view.units
        quickest = max(policy.steps.prefill_rate(width) / width for width in policy.widths)
        left = sum(held.num_prompt_tokens for held in view.groups.values())
        backlog = (left + view.num_queued_tokens) / (view.units * quickest)
        self._rate = 0.0 if backlog > BACKLOG_SECONDS else load.rate  # that is taken to go on

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
            if node.width in self.policy.widths and self.is_possible(node):
                choices.append((self._of(node), (node,)))
            if node.width > min(self.policy.widths):
                left, right = (self._best_of(half) for half in node.halves())
                choices.append((left[0] + right[0], left[1] + right[1]))
            best = min(choices, default=(float("inf"), ()), key=lambda choice: choice[0])
            self._best[node] = best
        return self._best[node]

    def is_possible(self, node: Group) -> bool:
        """Whether all that is on the units of a group could run in it."""
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
        steps, num, each = policy.steps, together - beyond, max(load.mean_prompt, 1.0)
        coming = Coming(math.inf if beyond else self._rate, each, part, slots)
        outputs = load.mean_output * steps.token_seconds(node.width, num, mean, coming)
        admitted = tokens * max(0.0, 1 - beyond / max(waiting, 1.0))
        prompts = steps.prompt_seconds(node.width, running, admitted, each)
        newcomers = self._rate * part * (prompts + outputs)
        queue = beyond * (2 * newcomers + beyond) / most
        total = together * prompts + outputs * (running + 2 * waiting + queue)
        last = prompts + 2 * outputs * (1 + beyond / most)
        one = steps.prompt_seconds(node.width, num, each, each) if self._rate else 0.0
        return total + together * (last + one)
