"""Engines of a fleet over audited echo runners, whose blocks are in pools that all groups share."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from echo_kit import (
    ENGINE_SEED,
    HOST_BLOCK_BYTES,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    AuditedRunner,
    Listener,
    make_request,
    reference,
)
from echo_pools import EchoMover, EchoPools, Told

from shiftjax.arch.presets import PRESETS
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import make_policy
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.fleet.fleet_policy import FleetPolicy
from shiftjax.fleet.regrouping import Fleet, SwitchRules
from shiftjax.fleet.shared_blocks import share
from shiftjax.host_tier.extents import HostBlocks, HostMemory
from shiftjax.parallel.arrangements import (
    Arrangement,
    all_groups,
    bound,
    equal_groups,
    possible_widths,
)
from shiftjax.parallel.grid import Grid, Group
from shiftjax.parallel.layout import Layout


class FleetRunner(AuditedRunner):
    """An audited runner of one group, whose blocks are in the pools of all."""

    def __init__(self, config: SchedulerConfig, group: Group, pools: EchoPools, host: dict):
        super().__init__(config, host)
        self.group, self.pools = group, pools

    def write(self, block: int, offset: int, token: int) -> None:
        self.pools.write(self.group, block, offset, token)

    def read(self, blocks: list[int], num_tokens: int) -> list[int]:
        return self.pools.read(self.group, blocks, num_tokens)

    def block(self, number: int) -> np.ndarray:
        return self.pools.whole(self.group, number)

    def put_block(self, number: int, contents: np.ndarray) -> None:
        self.pools.put(self.group, number, contents)

    def reset(self) -> None:
        super().reset()
        self.pools.forget(self.group)


def make_fleet(
    *,
    units: int = 8,
    num_kv_heads: int = 4,
    num_blocks: int = 40,
    block_size: int = 2,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    arrangement: Arrangement | None = None,
    policy: FleetPolicy | None = None,
    overlap: bool = True,
    fleet: Mapping[str, Any] | None = None,
    clock: Any = None,
    max_model_len: int = MAX_MODEL_LEN,
    num_host_blocks: int = 0,
    by_position: bool = False,
    **scheduler: Any,
) -> Engine:
    """An engine whose units form the groups that `policy` says, at first one for each unit."""
    model = replace(PRESETS["tiny"], num_heads=8, num_kv_heads=num_kv_heads)
    widths = possible_widths(units)
    own = {"widest": units, "by_position": by_position}
    layouts = {width: Layout(model, width, 1, **own) for width in widths}
    pools = EchoPools(layouts, Grid(1, units), num_blocks, block_size)
    groups = all_groups(units, widths)
    sizes = {group: pools.block_tokens(group.width) for group in groups}
    blocks = share(num_blocks, sizes)
    memory, extents = HostMemory(num_host_blocks * HOST_BLOCK_BYTES), {}
    lanes = []
    for group in groups:
        config = SchedulerConfig(
            num_blocks,
            sizes[group],
            max_num_seqs,
            max_num_batched_tokens,
            hash_size=block_size,
            **scheduler,
        )
        runner = FleetRunner(config, group, pools, extents)
        host = HostBlocks(memory, sizes[group], HOST_BLOCK_BYTES * group.width, block_size)
        own = Scheduler(config, None, blocks[group], host if num_host_blocks else None)
        lanes.append(Lane(own, runner, group.modes, group=group))
    limits = RequestLimits(
        VOCAB_SIZE,
        max_model_len,
        (num_blocks - 1) * max(sizes.values()),
        eos_token_ids=scheduler.get("eos_token_ids", ()),
        widest=units,
    )
    made = Fleet(
        lanes,
        arrangement or equal_groups(units, 1),
        policy or Told(),
        EchoMover(pools),
        limits,
        SwitchRules(**(fleet or {})),
    )
    mode_policy = make_policy("threshold", 8)
    return Engine(
        lanes, mode_policy, limits, overlap=overlap, seed=ENGINE_SEED, topology=made, clock=clock
    )


def random_arrangement(rng: random.Random, units: int = 8) -> Arrangement:
    found = equal_groups(units, 1)
    for group in rng.sample(all_groups(units, possible_widths(units)), rng.randrange(6)):
        found = (
            bound(found, group)
            if all(g.width <= group.width for g in found if g.overlaps(group))
            else found
        )
    return found


def random_requests(rng: random.Random, num: int, **more) -> list:
    shared = [rng.randrange(13) for _ in range(20)]
    requests = []
    for number in range(num):
        prompt = shared[: rng.choice([0, 0, 9, 17])]
        prompt = prompt + [rng.randrange(13) for _ in range(rng.randrange(1, 12))]
        requests.append(
            make_request(
                str(number),
                prompt,
                float(number),
                max_tokens=rng.randrange(1, 48 - len(prompt)),
                n=rng.choice([1, 1, 1, 3]),
                seed=rng.choice([None, number]),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=[rng.randrange(13)] if rng.random() < 0.2 else [],
                **more,
            )
        )
    return requests


def assert_as_alone(engine, requests, listener: Listener, but: frozenset[str] = frozenset()):
    for number, request in enumerate(requests):
        for index in range(request.sampling.n):
            outcome = listener.outcomes[request.request_id, index]
            wanted, reason = reference(engine, request, number, index)
            if outcome.last.finish_reason == "abort":
                assert outcome.token_ids == wanted[: len(outcome.token_ids)]
            elif request.request_id not in but:
                assert (outcome.token_ids, outcome.last.finish_reason) == (wanted, reason)
