"""Engines in phases over audited echo runners, for the tests of the control plane."""

from collections.abc import Callable

from echo_kit import (
    ENGINE_SEED,
    HOST_BLOCK_BYTES,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    AuditedRunner,
    runner_of,
)

from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import make_policy
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.host_tier.extents import HostBlocks, HostMemory
from shiftjax.parallel.grid import Group
from shiftjax.phases.parking import Parking
from shiftjax.phases.resharding import PHASES, Phase, Resharding


class LoadFault(Exception):
    """Raised by an exchange that was told to."""


class EchoExchange:
    """Empties all pools, as loading other weights does, and remembers; fails where told.

    Holds a switch to the rule: a phase ends when it cannot go on.
    """

    def __init__(self, lanes: dict[Phase, list[Lane]], memory: HostMemory):
        self.lanes, self.memory = lanes, memory
        self.loads: list[Phase] = []
        self.fails_at: int | None = None
        self.num_queued: Callable[[], int] = int  # of the engine, when there is one

    def load(self, phase: Phase) -> None:
        if len(self.loads) == self.fails_at:
            raise LoadFault
        if phase == "prefill":
            assert not any(lane.scheduler.requests for lane in self.lanes["decode"])
            assert self.num_queued() or any(e.scheduler.requests for e in self.lanes["prefill"])
        else:
            self._check_end_of_prefill()
        for lane in (*self.lanes["prefill"], *self.lanes["decode"]):
            assert not lane.in_flight
            assert isinstance(lane.runner, AuditedRunner)
            super(AuditedRunner, lane.runner).reset()
        self.loads.append(phase)

    def _check_end_of_prefill(self) -> None:
        schedulers = [lane.scheduler for lane in self.lanes["prefill"]]
        assert any(scheduler.parked for scheduler in schedulers)
        pinned = sum(extent.num_bytes for extent in self.memory.extents if extent.num_pins)
        for scheduler in schedulers:
            assert not scheduler.running
            assert not self.num_queued() or scheduler.is_full
            if not scheduler.waiting:
                continue
            first = scheduler.waiting[0]
            assert len(first.token_ids) + 1 < first.max_length, "it needs no room on the host"
            num_blocks = -(-len(first.token_ids) // scheduler.config.block_size)
            assert pinned + num_blocks * HOST_BLOCK_BYTES > self.memory.num_bytes
            assert num_blocks * HOST_BLOCK_BYTES <= self.memory.num_bytes


def make_phases(
    *,
    dp: tuple[int, int] = (1, 1),
    pp: tuple[int, int] = (2, 1),
    num_blocks: tuple[int, int] = (64, 64),
    num_host_blocks: int = 100,
    overlap: bool = True,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    clock: Callable[[], float] | None = None,
    **options: object,
) -> Engine:
    """An engine with (prefill, decode) lanes, which share a host tier of so many blocks."""
    memory, extents = HostMemory(num_host_blocks * HOST_BLOCK_BYTES), {}
    modes, lanes = Group(0, 2).modes, {}
    for phase, groups, stages, blocks in zip(PHASES, dp, pp, num_blocks, strict=True):
        config = SchedulerConfig(
            blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            num_micro_batches=stages,
            preemption="swap",
            **options,  # pyright: ignore[reportArgumentType]
        )
        lanes[phase] = []
        for _ in range(groups):
            host = HostBlocks(memory, block_size, HOST_BLOCK_BYTES)
            runner = AuditedRunner(config, extents, num_host_blocks)
            admission = Parking() if phase == "prefill" else None
            scheduler = Scheduler(config, tier=host, admission=admission)
            lanes[phase].append(Lane(scheduler, runner, modes))
    limits = RequestLimits(
        VOCAB_SIZE,
        MAX_MODEL_LEN,
        (min(num_blocks) - 1) * block_size,
        eos_token_ids=lanes["prefill"][0].scheduler.config.eos_token_ids,
    )
    exchange = EchoExchange(lanes, memory)
    engine = Engine(
        [*lanes["prefill"], *lanes["decode"]],
        make_policy("threshold", 8),
        limits,
        overlap=overlap,
        seed=ENGINE_SEED,
        clock=clock,
        topology=Resharding(lanes, exchange, memory, clock or (lambda: 0.0)),
    )
    exchange.num_queued = lambda: len(engine._queue)
    return engine


def exchange_of(engine: Engine) -> EchoExchange:
    assert engine.topology.find(Resharding) is not None
    exchange = engine.topology.find(Resharding).exchange
    assert isinstance(exchange, EchoExchange)
    return exchange


def runners_of(engine: Engine) -> list[AuditedRunner]:
    return [runner_of(engine, number) for number in range(len(engine.lanes))]
