"""Sizes of steps with prompts by what steps cost, and who may pass whom. No JAX.

What a size costs is what the policy that chooses modes would make of it, corrected by what steps
of its kind have taken. `drain.py` has the formulas.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from shiftjax.core.policy import Policy, work_of
from shiftjax.core.request import StepPlan
from shiftjax.core.step_sizes import Demand, StepSizes
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.step_times import StepKind, StepTimes, kind_of, predicted
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.parallel.grid import Mode
from shiftjax.sizing.drain import Queue, best_size, candidates
from shiftjax.sizing.size_stats import SizeStats

ARRIVALS = 0.2  # share of the recent rate that is taken to go on
PATIENCE = 2.0  # times what its prompt takes to compute, for which a request may be passed
RECENT, LEAST_RECENT = 16, 8  # arrivals that tell the rate: of so many, and not of fewer
PROMPT_SHARE, ANSWER_SHARE = 0.05, 0.02  # of the newest in the moving means of their tokens
LEARNT_DECODES = 8  # of so many steps of decodes alone one is learned from: most are alike
FIRST_ANSWER = 128.0  # tokens of an answer, before any has ended


def sizes_by_costs(deployment: Deployment, costs: GroupCosts | None) -> bool:
    """Whether steps of a deployment have sizes by these costs.

    Not those of a phase of its own, which has other limits, nor of engines that have no such
    choice. That devices are a CPU does not say how fast it is: there costs count
    where the policy or the setting `machine` names them.
    """
    if costs is None or deployment.parks:
        return False
    names = deployment.needs_costs or deployment.machine is not None
    is_known = names or not costs.machine.shared_cores
    return deployment.sizes_by == "cost" and costs.engine.sizes_steps and is_known


class Known(NamedTuple):
    """What sizes are chosen from: those that are compiled, and who chooses among which modes."""

    sizes: Sequence[int]
    policy: Policy
    modes: Sequence[Mode]
    costs: GroupCosts


def patience_of(known: Known) -> float:
    """Seconds that a request may be passed for, by prompt token."""
    work, costs = Work.prefill(max(known.sizes)), known.costs
    mode = known.policy.mode_of(work, known.modes, 0, None)
    seconds = costs.mode_seconds(mode, costs.size_of(work)) / len(costs.stages)
    return PATIENCE * seconds / work.num_tokens


class CostSizes(StepSizes):
    """Chooses the tokens of steps of one group from what they cost."""

    chooses = True

    def __init__(self, known: Known, num_groups: int = 1):
        sizes, self._policy, self._modes, self._costs = known
        self.sizes, self.num_groups = sorted(set(sizes)), num_groups
        self.answer = FIRST_ANSWER  # tokens, of those that have ended: a moving mean
        self.prompt = 0.0  # tokens that are not known already, of those that have come
        self.times = StepTimes()
        self.told = SizeStats()
        self._arrivals: deque[float] = deque(maxlen=RECENT)
        self._padded: dict[tuple[int, int], tuple[int, int]] = {}
        self._last_mode: Mode | None = None  # of the step that ended last
        self._attention = _attention_of(known.costs, known.modes[0])

    def arrived(self, seconds: float, num_tokens: int) -> None:
        """A prompt has come: how many come in a second, and how long they are."""
        self._arrivals.append(seconds)
        share = PROMPT_SHARE if self.prompt else 1.0
        self.prompt += share * (num_tokens - self.prompt)

    def ended(self, num_output_tokens: int) -> None:
        """An answer has ended: how long they are."""
        self.answer += ANSWER_SHARE * (num_output_tokens - self.answer)

    @property
    def num_recent(self) -> int:
        """How many arrivals the rate is told by."""
        return len(self._arrivals)

    def rate(self, now: float) -> float:
        """Requests that come in a second."""
        num = self.num_recent
        return 0.0 if num < LEAST_RECENT else num / max(1e-3, now - min(self._arrivals))

    def learn_step(self, plan: StepPlan, mode: Mode, seconds: float, is_hidden: bool) -> None:
        """A step has ended; what its like are said to take follows."""
        last_mode, self._last_mode = self._last_mode, mode
        if not plan.scheduled or (not plan.chunks and plan.step_id % LEARNT_DECODES):
            return
        if len(self._costs.stages) > 1:  # ends of unlike steps in a pipeline tell of neither
            return
        costs, work = self._costs, work_of(plan)
        num_guessing = work.num_sequences if plan.num_guesses else 0
        expected = predicted(costs, mode, last_mode, work, is_hidden, num_guessing)
        kind = kind_of(costs, mode, work, is_hidden)
        self.times.learn(kind, seconds - plan.proposing_seconds, expected)

    def choose(self, demand: Demand) -> int:
        """Return the size that is best for all that waits, see `drain.py`."""
        queue = self._queue(demand)
        return self.best(demand, queue, self._seconds(demand, queue.ends, queue.depth))

    def foresee(self, demand: Demand) -> int:
        """Return the same for prompts that nobody has sent yet."""
        queue = self._queue(demand)
        seconds = self._seconds(demand, queue.ends, queue.depth)
        return best_size(self.sizes, demand.most, queue, seconds)

    def _queue(self, demand: Demand) -> Queue:
        return Queue(
            demand.num_decodes,
            list(accumulate(left for left, _ in demand.prompts)),
            demand.num_more,
            int(demand.num_more * self.prompt),
            ARRIVALS * self.rate(demand.turn.now),
            self.answer,
            demand.num_others,
            self._depth(demand),
        )

    def best(self, demand: Demand, queue: Queue, seconds: Callable[[int, int], float]) -> int:
        """Return the size, of steps that take `seconds(index of a size, prompt tokens)`."""
        found = candidates(self.sizes, demand.most, queue, seconds)
        if not found:
            return demand.most
        best = min((each for each in found if each.keeps), key=lambda each: each.sized.cost)
        self.told.count(self.sizes, queue, found, best, seconds)
        return min(demand.most, self.sizes[best.place])

    def states(self) -> Iterator[Any]:
        """Return the counters."""
        yield self.told

    def _depth(self, demand: Demand) -> int:
        """How many steps with prompts are in the stages of a pipeline at once.

        The chunks of a prompt follow each other, unless decodes go along: these have to have their
        tokens first. Then the prompts of other micro-batches do, in half of the stages: all of
        them, as where every micro-batch has prompts, made first tokens late.
        """
        num_stages = len(self._costs.stages)
        if num_stages == 1 or not demand.num_decodes:
            return num_stages
        return max(1, min(num_stages // 2, len(demand.prompts) + demand.num_more))

    def _seconds(
        self, demand: Demand, ends: Sequence[int], depth: int = 1
    ) -> Callable[[int, int], float]:
        """Seconds between the ends of steps of `sizes[i]` with n prompt tokens each."""
        turn, num_decodes, costs = demand.turn, demand.num_decodes, self._costs
        pairs = sum(left * (start + left / 2) for left, start in demand.prompts)
        attention = self._attention
        slope = attention.token + attention.pair * pairs / ends[-1]  # for a prompt token
        reading = attention.fixed + attention.read * demand.context
        host = costs.host_seconds(Work.decode(num_decodes + len(ends), 0))
        bases: dict[tuple[int, int], tuple[float, float]] = {}

        def seconds(i: int, num_prompt_tokens: int) -> float:
            num_waiting = self._num_left(demand, ends, num_prompt_tokens)
            if (i, num_waiting) not in bases:
                bases[i, num_waiting] = self._base(self.sizes[i], demand, num_waiting)
            base, factor = bases[i, num_waiting]
            device = (base + reading + slope * num_prompt_tokens) / depth
            return factor * (max(device, host) if turn.is_hidden else device + host)

        return seconds

    def _num_left(self, demand: Demand, ends: Sequence[int], num_prompt_tokens: int) -> int:
        """How many sequences would still wait after a step with so many prompt tokens."""
        if not num_prompt_tokens:
            return 0
        num_started = min(len(ends), 1 + bisect_left(ends, num_prompt_tokens))
        return demand.num_waiting - max(0, num_started - demand.num_begun)

    def _base(self, num_tokens: int, demand: Demand, num_waiting: int) -> tuple[float, float]:
        """(seconds but for attention and the host, what steps of the kind have taken of that)."""
        turn, num_rows = demand.turn, min(num_tokens, demand.num_decodes + 1)
        work = Work(num_tokens, num_rows, num_rows, 0, 0, 0, demand.num_decodes)
        size = self._padded.get((num_tokens, num_rows))
        if size is None:
            size = self._padded[num_tokens, num_rows] = self._costs.size_of(work)
        mode = self._policy.mode_of(work, self._modes, num_waiting, turn.last_mode)
        factor = self.times.factor(StepKind(mode, *size, turn.is_hidden))
        return self._costs.mode_seconds(mode, size), factor


class _Attention(NamedTuple):
    """Seconds of attention, about: the same in every mode."""

    fixed: float
    read: float  # for each token that decodes attend to
    token: float  # for each token of a chunk
    pair: float  # for each pair of query and key of chunks


def _attention_of(costs: GroupCosts, mode: Mode) -> _Attention:
    """By differences of steps, two of decodes and two of chunks."""

    def seconds(work: Work) -> float:
        return costs.device_seconds(mode, work) - costs.mode_seconds(mode, costs.size_of(work))

    num, long, short, chunk = 64, 4096, 64, 256
    few, many = (seconds(Work.decode(num, context)) for context in (short, long))
    first, late = (seconds(Work.prefill(chunk, start)) for start in (0, 2 * long))
    read = max(0.0, many - few) / (num * (long - short))
    pair = max(0.0, late - first) / (chunk * 2 * long)
    fixed = max(0.0, few - read * num * short)
    token = max(0.0, (first - fixed) / chunk - pair * chunk / 2)
    return _Attention(fixed, read, token, pair)
