"""Groups with roles in the replay: what is sent, who decodes, and that no change drains."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from shiftjax.core.lane import Lane
from shiftjax.options import ConfigError
from shiftjax.sim.devices import Clock, CostRunner
from shiftjax.sim.experiments import target_from
from shiftjax.sim.named import RoleSplit, deploy, deploy_named
from shiftjax.sim.replay import _request, replay, serve
from shiftjax.sim.replay_metrics import role_shares, summary
from shiftjax.sim.roles import FixedRoles, Roles
from shiftjax.sim.roles_backend import RolesBackend
from shiftjax.sim.sim_backend import make_engine
from shiftjax.sim.trace import TraceRequest, poisson
from tests.spent import examples

WHOLE = target_from({"model": "llama-8b", "machine": "h100x8"})
TARGET = replace(WHOLE, machine=replace(WHOLE.machine, num_devices=4))
ROLES = ("prefill", "decode", "mixed")


def runner_of(lane: Lane) -> CostRunner:
    assert isinstance(lane.runner, CostRunner)
    return lane.runner


class Scripted:
    """Roles at random, one other each time that it is asked."""

    def __init__(self, seed: int, num: int = 4):
        self._rng, self._num = random.Random(seed), num

    def first(self):
        return ("mixed",) * self._num

    def arrange(self, view):
        while True:
            found = tuple(self._rng.choice(ROLES) for _ in range(self._num))
            takes = any(role != "decode" for role in found)
            if takes and any(role != "prefill" for role in found):
                return found


class Watched:
    """An engine whose steps and sends are looked at as they happen."""

    def __init__(self, name: str, policy=None, num_blocks=1000, **budgets):
        split = deploy_named(TARGET, f"{name},num_blocks={num_blocks}", **budgets)
        assert isinstance(split, RoleSplit)
        self.clock = Clock()
        self.engine, _ = make_engine(TARGET, split.sides, self.clock, kind=RolesBackend)
        roles = self.engine.topology.find(Roles)
        assert roles is not None
        self.roles = roles
        if policy is not None:
            roles.policy = policy
        self.arrives: dict[str, float] = {}
        self.computed: Counter[tuple[str, int]] = Counter()
        self.blocks: list[tuple[Lane, Lane, int]] = []
        self._watch()

    def _watch(self):
        begin = self.roles._begin

        def noted(sequence, source, target):
            num = self.roles.run.num_sent_blocks
            if not begin(sequence, source, target):
                return False
            sent = max(self.roles._on_way, key=lambda each: each.number)
            self.arrives[sequence.request.request_id] = sent.arrives
            self.blocks.append((source, target, self.roles.run.num_sent_blocks - num))
            return True

        self.roles._begin = noted
        for lane in self.engine.lanes:
            runner = runner_of(lane)
            runner.run = self._looking(runner, runner.run)

    def _looking(self, runner, run):
        def looked(plan, mode, previous_handle):
            handle = run(plan, mode, previous_handle)
            seconds = runner.steps[-1].device_seconds
            for item in plan.scheduled:
                name = item.sequence.request.request_id
                begun = handle.done - seconds
                assert begun >= self.arrives.get(name, 0.0) - 1e-9, "decoded before its KV came"
                self.computed.update(
                    (name, token) for token in range(item.start, item.start + item.num_tokens)
                )
            return handle

        return looked

    def serve(self, requests, check=False):
        heard = 0

        def hear(_):
            nonlocal heard
            heard += 1
            if check and heard % 16 == 0:
                self.engine.check()

        coming = [_request(n, each, TARGET.model.vocab_size) for n, each in enumerate(requests)]
        records, refused = serve(self.engine, self.clock, coming, hear)
        assert not refused
        self.engine.check()
        assert not self.roles._on_way
        return records


def traffic(num, seed=0):
    found = poisson(20.0, num / 20.0, 900, 40, seed, 1.0)
    return [replace(each, num_prompt_tokens=min(each.num_prompt_tokens, 4000)) for each in found]


def test_a_name_is_a_deployment_for_each_side():
    split = deploy_named(TARGET, "roles:dp2+sp2,target_ttft=2")
    assert isinstance(split, RoleSplit)
    assert [each.mesh for each in split.sides] == ["dp=2 sp=1 tp=1", "dp=1 sp=2 tp=1"]
    assert {each.targets.default.ttft for each in split.sides} == {2.0}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("roles:dp2+dp1", "on all 4 devices"),
        ("roles:dp1+dp1+dp2", "on all 4 devices"),
        ("roles:pp2+dp2", "have no stages"),
        ("roles:sp4", "has no roles to share"),
        ("roles:", "spells no degrees"),
    ],
)
def test_splits_that_are_none(name, words):
    with pytest.raises(ConfigError, match=words):
        deploy_named(TARGET, name)


def test_each_side_does_its_part_and_kv_is_counted():
    watched = Watched("roles:dp1+dp3", prefix_caching=False)
    requests = traffic(30)
    records = watched.serve(requests, check=True)
    prefill, *decode = watched.engine.lanes
    assert all(step.num_decodes == 0 for step in runner_of(prefill).steps)
    assert all(s.num_decodes == s.num_tokens for lane in decode for s in runner_of(lane).steps)
    assert all(len(runner_of(lane).steps) > 10 for lane in decode)
    # Every token's KV is computed once: what was sent is not computed again.
    wanted = {
        (str(n), token): 1
        for n, each in enumerate(requests)
        for token in range(each.num_prompt_tokens + each.num_output_tokens - 1)
    }
    assert watched.computed == wanted
    several = [r for r in requests if r.num_output_tokens > 1]
    run, size = watched.roles.run, prefill.scheduler.config.block_size
    assert run.num_sent == len(several)
    blocks = sum(-(-each.num_prompt_tokens // size) for each in several)
    token_bytes = 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, numbers, bytes
    assert run.num_sent_bytes == blocks * size * token_bytes
    assert [r.num_output_tokens for r in records] == [r.num_output_tokens for r in requests]


def test_kv_takes_its_time_on_the_links():
    """With links a thousand times slower the second token comes so much later, the first not."""
    (slow_way,) = (TARGET.machine.point_to_point[0].scaled(1, 1e-3),)
    slow = replace(TARGET, machine=replace(TARGET.machine, point_to_point=(slow_way,)))
    one = [TraceRequest(0.0, 4096, 2)]
    runs = [replay(one, target, deploy_named(target, "roles:dp2+dp2")) for target in (TARGET, slow)]
    fast, late = (run.requests[0] for run in runs)
    assert fast.ttft == late.ttft
    num_bytes = 4096 * 2 * 32 * 8 * 128 * 2
    rate = TARGET.machine.point_to_point[0].bytes_per_second
    assert late.tpot and fast.tpot
    assert late.tpot - fast.tpot == pytest.approx(num_bytes / rate * 999, rel=0.01)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10_000))
def test_roles_change_at_random_and_nothing_is_lost(seed):
    """Nobody drains: requests go on through changes, and each token is computed once."""
    budgets = {"prefix_caching": False, "max_num_batched_tokens": 512, "max_num_seqs": 2}
    watched = Watched("roles:dp4", Scripted(seed), **budgets)
    requests = traffic(12, seed)
    watched.serve(requests, check=True)
    assert max(watched.computed.values()) == 1
    num = sum(each.num_prompt_tokens + each.num_output_tokens - 1 for each in requests)
    assert watched.computed.total() == num


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 10_000))
def test_small_pools_preempt_and_still_everything_ends(seed):
    """They are computed again where they were sent, and sent on if that computes prompts now."""
    watched = Watched("roles:dp4", Scripted(seed), num_blocks=40, max_num_batched_tokens=512)
    requests = [TraceRequest(0.01 * n, 150 + 13 * n, 40) for n in range(14)]
    watched.serve(requests, check=True)
    preempted = sum(sum(e.scheduler.num_preemptions.values()) for e in watched.engine.lanes)
    event(f"preempted: {preempted > 0}")


def test_a_group_that_turns_to_prompts_hands_over_what_it_decodes():
    watched = Watched("roles:dp4", FixedRoles(("mixed",) * 4), prefix_caching=False)

    class Turns:
        def first(self):
            return ("mixed",) * 4

        def arrange(self, view):
            return ("prefill", "decode", "decode", "decode") if view.now > 0.3 else None

    watched.roles.policy = Turns()
    requests = [TraceRequest(0.0, 600, 300) for _ in range(8)]
    watched.serve(requests, check=True)
    first = watched.engine.lanes[0]
    handed = [source for source, _, _ in watched.blocks if source is first]
    assert len(handed) == 2  # which it had begun to decode; nothing is computed again
    assert max(watched.computed.values()) == 1
    assert runner_of(first).steps[-1].done < 0.4 < watched.clock.now


def test_what_the_target_has_cached_is_not_sent():
    """The second turn of a conversation has the blocks of the first where that was decoded."""
    watched = Watched("roles:dp2+dp2")
    ids = tuple(range(8))
    turns = [TraceRequest(3.0 * n, 2048 + 1024 * n, 20, ids) for n in range(2)]
    watched.serve(turns)
    (_, first, all_of_it), (_, second, rest) = watched.blocks
    size = first.scheduler.config.block_size
    assert first is second
    assert (all_of_it, rest) == (2048 // size, 1024 // size)
    assert watched.roles.run.num_kept_blocks == 2048 // size


def test_the_cost_policy_shares_roles_out_under_load():
    run = replay(poisson(20, 4, 4096, 60, 0, 1.0), TARGET, deploy_named(TARGET, "roles:dp4"))
    row = summary(run)
    assert run.roles is not None
    assert row["role_changes"] == len(run.roles.turns) - 1 > 0
    assert sum(role_shares(run).values()) == pytest.approx(1)
    assert row["kv_sent_sequences"] == run.roles.num_sent > 0


def test_goodput_counts_requests_inside_the_targets_of_the_deployment():
    requests = poisson(10, 4, 2048, 60, 0, 1.0)
    loose = summary(replay(requests, TARGET, deploy(TARGET, "dp")))
    strict = summary(replay(requests, TARGET, deploy(TARGET, "dp,target_tpot=0.0001")))
    assert loose["goodput_requests_per_second"] == loose["requests_per_second"]
    assert strict["goodput_requests_per_second"] == 0.0
