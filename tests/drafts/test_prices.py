"""How far drafts go, decided with the mode that the step will run in: against all combinations.

Costs are made up, sequences and groups are those of an engine over audited echo runners.
"""

from itertools import product
from typing import Any

import pytest
from echo_kit import generate, make_engine, make_request, runner_of
from guesses_kit import Guesses, let_draft
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shiftjax.core.policies import CostPolicy, ThresholdPolicy
from shiftjax.costs.machine_files import load_engine
from shiftjax.parallel.grid import Mode

BASE, SHIFT = Mode(2, 2), Mode(2, 1)
BUCKETS = (4, 8, 16)


class Costs:
    """Stands for a cost model: seconds by mode and padded tokens; the host takes nothing."""

    engine, stages = load_engine("shiftjax"), (None,)

    def __init__(self, base, shift, buckets=BUCKETS, hidden_seconds=0.0):
        self.tables, self.buckets = {BASE: base, SHIFT: shift}, buckets
        self.hidden_seconds = hidden_seconds  # of the host, unless a step is planned ahead

    def size_of(self, work):
        tokens = next((bucket for bucket in self.buckets if bucket >= work.num_tokens), 10**6)
        return tokens, work.num_rows

    def mode_seconds(self, mode, size):
        return self.tables[mode](size[0])

    def seconds(self, mode, work):
        return self.mode_seconds(mode, self.size_of(work))

    def paced_seconds(self, mode, work, num_batches, num_guessing=0, *, is_hidden):
        return self.seconds(mode, work) + (0.0 if is_hidden else self.hidden_seconds)


def cost_policy(costs: Costs, margin: float = 0.0) -> CostPolicy:
    return CostPolicy(costs, margin)  # pyright: ignore[reportArgumentType]


class Claiming(Guesses):
    """Drafts whose tokens claim these probabilities, given those before; remembers them."""

    def __init__(self, claims: list[float], choice: str = "cost", quality: int = 10):
        super().__init__(quality, most=len(claims), choice=choice)
        self.claims = claims
        self.offered: dict[Any, list[float]] = {}  # survivals

    def draft(self, name, most):
        if (found := super().draft(name, most)) is None:
            return None
        claims = self.claims[: len(found.tokens)]
        found = self.rated(name, found.tokens, claims, "guess")
        self.offered[name] = found.survivals
        return found


def no_time() -> float:
    """A clock that stands still: steps take no time, and nobody learns what they take."""
    return 0.0


class Witness:
    """Around a runner: every step that could draft, with what was offered and what was known."""

    def __init__(self, engine, guesses: Claiming):
        self.engine, self.guesses, self.steps = engine, guesses, []
        self.lane = engine.lanes[0]
        self.run, self.last = self.lane.runner.run, None
        self.lane.runner.run = self

    def __call__(self, plan, mode, previous):
        waiting = self.engine.stats().num_waiting
        if self.guesses.offered:
            self.steps.append((plan, mode, dict(self.guesses.offered), waiting, self.last))
        self.guesses.offered.clear()
        self.last = mode
        return self.run(plan, mode, previous)


seconds_of_steps = st.fixed_dictionaries(
    {b: st.floats(0.5, 9.0).map(lambda seconds, b=b: seconds + b / 4) for b in BUCKETS}
)


@hypothesis_settings(deadline=None, derandomize=True, max_examples=60)
@given(
    seconds_of_steps,
    seconds_of_steps,
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 10),
    st.integers(2, 3),
    st.booleans(),
)
def test_no_other_lengths_or_mode_promise_more(
    base, shift, claims, margin, quality, max_num_seqs, overlap
):
    policy = cost_policy(Costs(lambda n: base.get(n, 99.0), lambda n: shift.get(n, 99.0)), margin)
    engine = make_engine(
        policy=policy,
        overlap=overlap,
        clock=no_time,
        max_num_seqs=max_num_seqs,
        max_proposed_rows=12,
        max_num_batched_tokens=16,
    )
    guesses = Claiming(claims, quality=quality)
    let_draft(engine, guesses, *BUCKETS, clock=no_time)
    witness = Witness(engine, guesses)
    generate(engine, *(make_request(f"r{i}", [1, i], seed=i, max_tokens=8) for i in range(4)))
    for plan, mode, offered, num_waiting, last in witness.steps:
        drafted = {i.sequence: i.proposal for i in plan.scheduled if i.proposal is not None}
        num_drafted = sum(len(draft.tokens) for draft in drafted.values())
        plain, work = plan.num_tokens - num_drafted, Costs(None, None)
        room = min(16 - plain, 12 - (plan.num_rows - num_drafted))

        def rate(num, gain, mode, plain=plain, work=work):
            size = next(bucket for bucket in work.buckets if bucket >= plain + num)
            return (plain + gain) / policy.costs.mode_seconds(mode, (size, 0))

        chosen = rate(num_drafted, sum(sum(d.survivals) for d in drafted.values()), mode)
        best = max(
            rate(sum(lengths), sum(sum(s[:n]) for s, n in pairs), some)
            for lengths in product(*(range(len(s) + 1) for s in offered.values()))
            if sum(lengths) <= room
            for pairs in [list(zip(offered.values(), lengths, strict=True))]
            for some in (BASE, SHIFT)
        )
        # A switch has to save the margin, to SHIFT twice that while others wait.
        assert chosen * (1 + 2 * margin) >= best * (1 - 1e-9)
        size = next(bucket for bucket in BUCKETS if bucket >= plain)
        without = policy._choose((size, 0), (BASE, SHIFT), num_waiting > 0, last)
        assert chosen >= rate(0, 0.0, without) * (1 - 1e-9), "no drafts promised more"


def many(costs: Costs, claims: list[float] | None, margin: float = 0.02):
    """The modes and tokens of steps with all of 64 sequences, with drafts or without."""
    engine = make_engine(
        policy=cost_policy(costs, margin),
        clock=no_time,
        num_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_proposed_rows=256,
    )
    if claims is not None:
        let_draft(engine, Claiming(claims), *costs.buckets, clock=no_time)
    generate(
        engine,
        *(
            make_request(f"r{i}", [1, i % 13], seed=i, max_tokens=13, ignore_eos=True)
            for i in range(64)
        ),
    )
    runner = runner_of(engine)
    plans = zip(runner.plans, runner.modes, strict=True)
    decodes = [(mode, p.num_tokens) for p, mode in plans if p.num_rows >= 64 and p.step_id > 0]
    return [step for step in decodes if step[1] >= 64]


@pytest.mark.parametrize(("base_seconds", "largest"), [(9.0, 256), (99.0, 64)])
def test_without_a_cost_policy_costs_are_those_of_the_mode_that_will_be_chosen(
    base_seconds, largest
):
    """64 decodes run in SHIFT; guesses carry them past the threshold, if BASE is worth it."""
    costs = Costs(lambda n: base_seconds, lambda n: 8.0, (64, 128, 256))
    engine = make_engine(
        policy=ThresholdPolicy(64),
        clock=no_time,
        num_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_proposed_rows=256,
    )
    let_draft(engine, Claiming([0.9] * 3), *costs.buckets, clock=no_time, costs=costs)
    generate(engine, *(make_request(f"r{i}", [1, i % 13], max_tokens=13) for i in range(64)))
    assert max(plan.num_tokens for plan in runner_of(engine).plans[1:]) == largest


def test_drafts_move_the_crossing_of_the_modes():
    """SHIFT is cheap for few tokens, BASE for many: 64 alone, 256 with three guesses each."""
    costs = Costs(lambda n: 11 + 0.014 * n, lambda n: 8 + 0.03 * n, (64, 128, 256))
    assert set(many(costs, None)) == {(SHIFT, 64)}
    with_drafts = many(costs, [0.9, 0.9, 0.9])
    assert with_drafts and set(with_drafts) == {(BASE, 256)}


def test_a_gain_below_the_bubble_is_none():
    """Who drafts commits first, and the host's time is no longer hidden."""
    policy = cost_policy(cheap := Costs(lambda n: 9.0, lambda n: 1.0))
    engine = make_engine(policy=policy, clock=no_time)
    let_draft(engine, Claiming([0.5]), *BUCKETS, clock=no_time)
    request = make_request("a", [1], seed=1, max_tokens=20, ignore_eos=True)
    assert generate(engine, request)["a", 0].last.metrics.num_proposed_tokens > 0
    cheap.hidden_seconds = 2.0
    assert generate(engine, request)["a", 0].last.metrics.num_proposed_tokens == 0


def test_to_fill_crosses_no_threshold():
    """Guesses for 32 tokens, a threshold of 8: they stop there, and the step stays in SHIFT."""
    engine = make_engine(max_proposed_rows=32)
    let_draft(engine, Claiming([0.9] * 8, "fill"), 32)
    requests = [make_request(f"r{i}", [1], seed=i, max_tokens=12, min_tokens=9) for i in range(3)]
    generate(engine, *requests)
    runner = runner_of(engine)
    sizes = [
        (plan.num_tokens, mode)
        for plan, mode in zip(runner.plans, runner.modes, strict=True)
        if plan.num_proposals
    ]
    assert max(sizes, key=lambda size: size[0]) == (8, SHIFT)
    assert {mode for _, mode in sizes} == {SHIFT}


def test_each_group_chooses_alone():
    """One has guesses and commits first to the end; the other has none and plans ahead."""

    class OneSided(Guesses):
        def draft(self, name, most):
            return super().draft(name, most) if name.request.request_id == "a" else None

    engine = make_engine(dp=2)
    let_draft(engine, OneSided(most=1))
    for name in ("a", "b"):
        engine.add_request(make_request(name, [1], seed=3, max_tokens=40, ignore_eos=True))
    while engine.has_work():
        engine.step(0.0)
    (drafting, plain), runners = engine.lanes, (runner_of(engine, 0), runner_of(engine, 1))
    assert drafting.scheduler.lookahead.commits_first
    assert not plain.scheduler.lookahead.commits_first
    assert [len(runner.plans) for runner in runners] == [20, 40]
    assert sum(plan.num_proposals for plan in runners[1].plans) == 0


class Paced(Costs):
    """Of four stages; remembers for how many micro-batches a price was asked."""

    stages = (None,) * 4

    def __init__(self):
        super().__init__(lambda n: 9.0, lambda n: 1.0)
        self.asked: list[int] = []

    def paced_seconds(self, mode, work, num_batches, num_guessing=0, *, is_hidden):
        self.asked.append(num_batches)
        return super().paced_seconds(mode, work, num_batches, num_guessing, is_hidden=is_hidden)


@pytest.mark.parametrize("num_seqs", [1, 2, 4, 8])
def test_a_pipeline_is_priced_by_the_micro_batches_that_have_sequences(num_seqs):
    """One alone waits in all stages for its tokens; four are as many as compute at once."""
    costs = Paced()
    engine = make_engine(policy=cost_policy(costs), clock=no_time, num_micro_batches=4)
    let_draft(engine, Claiming([0.9] * 2), *BUCKETS, clock=no_time)
    requests = (make_request(f"r{i}", [1, i], max_tokens=30) for i in range(num_seqs))
    for request in requests:
        engine.add_request(request)
    for step in range(24):
        engine.step(float(step))
    del costs.asked[: len(costs.asked) // 2]  # the first ones fill it
    assert set(costs.asked) == {min(num_seqs, 4)}


class Slow(Claiming):
    """A guess takes a second; records are the requests' seeds."""

    now = 0.0

    def draft(self, name, most):
        self.now += 1.0
        return super().draft(name, most)

    def record(self, name):
        return float(name.request.sampling.seed)


@pytest.mark.parametrize("predicted", [25.0, 45.0])
def test_drafting_takes_a_share_of_the_step_and_the_best_go_first(predicted):
    """A tenth of the predicted seconds: 3 or 5 guesses of a second each."""
    costs = Costs(lambda n: 99.0, lambda n: predicted, (16,))
    engine = make_engine(policy=cost_policy(costs), max_num_seqs=8, max_proposed_rows=16)
    guesses = Slow([1.0])
    let_draft(engine, guesses, 16, clock=lambda: guesses.now)
    speculation = engine.lanes[0].scheduler.lookahead
    seeds = [3, 8, 1, 6, 2, 7, 4, 5]
    for seed in seeds:
        engine.add_request(make_request(f"r{seed}", [1], seed=seed, max_tokens=9, ignore_eos=True))
    engine.step(0.0)
    speculation._without.clear()  # a second is too slow
    engine.step(0.0)
    plan = next(plan for plan in runner_of(engine).plans if plan.num_proposals)
    drafted = [i.sequence.request.sampling.seed for i in plan.scheduled if i.proposal is not None]
    assert sorted(drafted) == list(range(9 - int(predicted / 10 + 1), 9))
