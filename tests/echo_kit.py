"""What the tests of the control plane share: engines over audited echo runners, and the truth."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shiftjax.arch.cache import longest_kept
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import make_policy
from shiftjax.core.policy import Policy
from shiftjax.core.request import Event, Request, SamplingParams, StepPlan, derive_seed
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.host_tier.extents import EXTENT_SIZES, MOST_AHEAD, HostBlocks, HostMemory
from shiftjax.parallel.grid import Group, Mode
from shiftjax.sim.echo import EchoRunner, echo_token

VOCAB_SIZE = 13  # small, so that stop ids are hit often
MAX_MODEL_LEN = 48
ENGINE_SEED = 5
HOST_BLOCK_BYTES = 24


class StepFault(Exception):
    """Raised by a runner that was told to."""


class AuditedRunner(EchoRunner):
    """Checks every plan against the budgets and the KV; fails or poisons where told."""

    def __init__(self, config: SchedulerConfig, host: dict | None = None, num_host_blocks=1 << 30):
        super().__init__(
            VOCAB_SIZE,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            host=host,
            check=True,
            windows=config.windows,
        )
        self.config, self.num_host_blocks = config, num_host_blocks
        self.faults: dict[int, str] = {}  # number of the run -> "run" or "fetch"
        self.poisoned: set[str] = set()  # requests whose rows are not finite
        self.poisoned_index: int | None = None  # only this continuation of them; None: all
        self.plans: list[StepPlan] = []
        self.failed_requests: set[str] = set()
        self.num_resets = 0

    def run(self, plan: StepPlan, mode: Mode, previous_handle):
        check_plan(plan, self.config)
        self.plans.append(plan)
        fault = self.faults.get(len(self.plans) - 1)
        if fault is not None:
            self.failed_requests |= {s.sequence.request.request_id for s in plan.scheduled}
        if fault == "run":
            raise StepFault("run")
        output = super().run(plan, mode, previous_handle)
        assert sum(map(len, self.host.values())) <= self.num_host_blocks
        row = 0
        for item in plan.scheduled:
            is_hit = self.poisoned_index in (None, item.sequence.index)
            if is_hit and item.sequence.request.request_id in self.poisoned:
                output.is_finite[row : row + item.num_rows] = False
            row += item.num_rows
        return StepFault("fetch") if fault == "fetch" else output

    def fetch(self, handle):
        if isinstance(handle, StepFault):
            raise handle
        return super().fetch(handle)

    def reset(self) -> None:
        self.num_resets += 1
        super().reset()


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """The budgets of a step and the order of what is in it."""
    assert (0 if plan.offloads else 1) <= plan.num_tokens <= config.max_num_batched_tokens
    assert plan.num_tokens == sum(item.num_tokens for item in plan.scheduled)
    assert plan.num_rows == sum(item.num_rows for item in plan.scheduled)
    assert len(plan.scheduled) <= config.max_step_seqs
    assert {item.sequence.micro_batch for item in plan.scheduled} <= {plan.micro_batch}
    may_be_all_rows = plan.num_proposals and plan.num_tokens <= config.max_rows
    assert plan.num_rows <= (config.max_rows if may_be_all_rows else config.max_step_seqs)
    assert len({item.sequence for item in plan.scheduled}) == len(plan.scheduled)
    assert plan.num_proposals == sum(item.proposal is not None for item in plan.scheduled)
    for number, item in enumerate(plan.scheduled):
        assert 0 <= item.num_rows <= item.num_tokens > 0
        if number < plan.num_decodes:
            assert item.num_tokens == item.num_rows == 1
        else:
            assert item.previous_row == -1
    targets = [block for _, blocks in plan.restores for block in blocks if block]
    targets += [block for each in plan.unit_restores for block in each.blocks]
    assert len(targets) == len(set(targets))
    assert all(len(blocks) in EXTENT_SIZES for _, blocks in plan.offloads + plan.restores)
    assert all(block for _, blocks in plan.offloads for block in blocks)
    assert len(plan.prefetches) == len(set(plan.prefetches)) <= MOST_AHEAD


def make_engine(
    *,
    dp: int = 1,
    overlap: bool = True,
    policy: Policy | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    clock: Callable[[], float] | None = None,
    num_host_blocks: int = 0,
    **options: object,
) -> Engine:
    """Groups share the host tier, where a block of the first one counts as `HOST_BLOCK_BYTES`.

    Every second group has a layout that keeps all heads twice.
    """
    config = SchedulerConfig(
        num_blocks,
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        **options,  # pyright: ignore[reportArgumentType]
    )
    limits = RequestLimits(
        VOCAB_SIZE,
        MAX_MODEL_LEN,
        longest_kept(num_blocks - 1, config.windows, block_size, max_num_batched_tokens),
        eos_token_ids=config.eos_token_ids,
    )
    modes = Group(0, 2).modes
    memory, extents = HostMemory(num_host_blocks * HOST_BLOCK_BYTES), {}
    lanes = []
    for number in range(dp):
        block_bytes = HOST_BLOCK_BYTES * (1 + number % 2)
        host = HostBlocks(memory, block_size, block_bytes) if num_host_blocks else None
        scheduler = Scheduler(config, tier=host)
        lanes.append(Lane(scheduler, AuditedRunner(config, extents, num_host_blocks), modes))
    policy = policy or make_policy("threshold", 8)
    return Engine(lanes, policy, limits, overlap=overlap, seed=ENGINE_SEED, clock=clock)


def runner_of(engine: Engine, group: int = 0) -> AuditedRunner:
    runner = engine.lanes[group].runner
    assert isinstance(runner, AuditedRunner)
    return runner


def reference(engine: Engine, request: Request, number: int, index: int) -> tuple[list[int], str]:
    """The tokens and the finish reason of one continuation, by the shortest loop there is."""
    sampling, limits = request.sampling, engine.limits
    seed = derive_seed(ENGINE_SEED, number) if sampling.seed is None else sampling.seed
    seed = derive_seed(seed, index)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else limits.eos_token_ids)}
    token_ids, output = list(request.prompt_token_ids), []
    room = min(limits.max_model_len, limits.num_kv_tokens + 1) - len(token_ids)
    most = room if sampling.max_tokens is None else sampling.max_tokens
    while len(output) < most:
        token = echo_token(token_ids[-1], len(token_ids) - 1, seed, VOCAB_SIZE)
        while len(output) < sampling.min_tokens and token in stops:
            token = (token + 1) % VOCAB_SIZE
        output.append(token)
        token_ids.append(token)
        if token in stops:
            return output, "stop"
    return output, "length"


@dataclass
class Outcome:
    """All that was heard of one continuation."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def last(self) -> Event:
        return self.events[-1]


class Listener:
    """Collects events and holds them to their contract."""

    def __init__(self):
        self.outcomes: dict[tuple[str, int], Outcome] = defaultdict(Outcome)
        self.ended: set[str] = set()

    def hear(self, events: list[Event]) -> None:
        for event in events:
            outcome = self.outcomes[event.request_id, event.index]
            assert event.request_id not in self.ended, "an event after the terminal one"
            assert not outcome.events or outcome.last.finish_reason is None, (
                "an event after the end"
            )
            assert (event.metrics is None) == (event.finish_reason is None)
            outcome.events.append(event)
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            if event.is_last:
                self.ended.add(event.request_id)


def run_to_end(engine: Engine, listener: Listener, most: int = 2000) -> int:
    """Steps until nothing is left; returns how many. Conservation is checked after each."""
    for number in range(most):
        if not engine.has_work():
            return number
        listener.hear(engine.step(float(number)))
        engine.check()
    raise AssertionError(f"still work to do after {most} steps: {engine.stats()}")


def generate(engine: Engine, *requests: Request) -> dict[tuple[str, int], Outcome]:
    """Add the requests, run to the end, return what came of them."""
    listener = Listener()
    for request in requests:
        engine.add_request(request)
    run_to_end(engine, listener)
    assert listener.ended == {request.request_id for request in requests}
    assert_quiescent(engine)
    return listener.outcomes


def assert_quiescent(engine: Engine) -> None:
    """Nothing is held when nothing runs."""
    engine.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    for group in engine.lanes:
        assert not group.in_flight and not group.scheduler.requests
        host = group.scheduler.tables.tier
        if isinstance(host, HostBlocks):
            assert host.memory.num_used_bytes == host.memory.num_idle_bytes
            written, dropped = (
                set(runner_of(engine).host),
                {*host.memory.given, *host.memory.dropped},
            )
            assert {extent.number for extent in host.memory.extents} == written - dropped


def make_request(name: str, prompt: list[int], arrival: float = 0.0, **sampling) -> Request:
    priority = sampling.pop("priority", 0)
    salt = sampling.pop("cache_salt", None)
    return Request(name, prompt, SamplingParams(**sampling), arrival, priority, None, salt)


class Alternating:
    """Tokens must be even, odd, even ...; after `most` tokens nothing may follow."""

    decides_end = True

    def __init__(self, most: int = 10**6, breaks_at: int = 10**6):
        self.accepted: list[int] = []
        self.most, self.breaks_at = most, breaks_at
        self.mask = self._mask()

    def _mask(self) -> np.ndarray:
        parity = len(self.accepted) % 2
        allowed = range(parity, VOCAB_SIZE, 2) if len(self.accepted) < self.most else ()
        return np.array([sum(1 << token for token in allowed)], np.uint32)

    def accept(self, token_id: int) -> bool:
        if len(self.accepted) == self.breaks_at:
            raise ZeroDivisionError("a bug in a constraint")
        assert self.mask[0] >> token_id & 1, "a token that was not allowed"
        self.accepted.append(token_id)
        self.mask = self._mask()
        return bool(self.mask.any())


def constrained(
    name: str, constraint: Alternating | None, prompt: tuple = (1, 2), **sampling
) -> Request:
    params = SamplingParams(**({"max_tokens": 12} | sampling))
    constraints = () if constraint is None else (constraint,)
    return Request(name, list(prompt), params, constraints=constraints)


def parities(tokens: list[int]) -> list[int]:
    return [token % 2 for token in tokens]
