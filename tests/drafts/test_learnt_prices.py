"""What steps took corrects what drafts are said to cost: on a virtual clock, exactly."""

from dataclasses import replace

import pytest
from echo_kit import VOCAB_SIZE, make_request
from guesses_kit import let_draft
from test_prices import BASE, SHIFT, Claiming, Costs
from time_kit import PacedRunner

from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import ThresholdPolicy
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.costs.machine_files import load_engine
from shiftjax.sim.replay import Clock

SMALL, LARGE = 4, 8
PREDICTED = {SMALL: 1.0, LARGE: 1.05}  # 2.2 and 2.5 tokens a step: the large one pays


class Padded(Costs):
    """Made up as well; as many rows as tokens, and a host."""

    def __init__(self, seconds, host_seconds=0.0, switch_seconds=0.0):
        super().__init__(seconds, seconds, tuple(PREDICTED), host_seconds)
        self.engine = replace(load_engine("shiftjax"), switch_seconds=switch_seconds)

    def size_of(self, work):
        size = super().size_of(work)[0]
        return size, size


class Measured(PacedRunner):
    """A step takes what `truth` says of its padded tokens and its number, after the host."""

    def __init__(self, clock, truth, host_seconds=0.0, switch_seconds=0.0):
        super().__init__(clock, 0.0)
        self.truth, self.host_seconds, self.switch_seconds = truth, host_seconds, switch_seconds
        self.sizes: list[int] = []
        self.last_mode = None

    def run(self, plan, mode, previous_handle):
        self.clock.now += self.host_seconds
        self.sizes.append(next(size for size in PREDICTED if size >= plan.num_tokens))
        self.seconds = self.truth(self.sizes[-1], len(self.sizes))
        self.seconds += (self.last_mode not in (None, mode)) * self.switch_seconds
        self.last_mode = mode
        return super().run(plan, mode, previous_handle)


class Steady(Claiming):
    """Guesses whose claims stay what they are; each takes a hundredth of a second to make."""

    def __init__(self, clock, claim, learns=False):
        super().__init__([claim] * (LARGE - 1), quality=round(10 * claim))
        self.clock, self.learns = clock, learns

    def draft(self, name, most):
        self.clock.now += 0.01
        return super().draft(name, most)

    def learn(self, name, draft, offered, accepted):
        if self.learns:
            super().learn(name, draft, offered, accepted)


def served(truth, num_tokens=1500, claim=0.6, prompt=(1, 2), learns=False, **overhead):
    """(runner, steps' seconds, what was learned) of one sequence with guesses."""
    clock = Clock()
    runner = Measured(clock, truth, **overhead)
    config = SchedulerConfig(1000, 4, 1, LARGE, max_proposed_rows=LARGE)
    lane = Lane(Scheduler(config), runner, (BASE, SHIFT))
    limits = RequestLimits(VOCAB_SIZE, 3000, 3000)
    engine = Engine([lane], ThresholdPolicy(SMALL), limits, clock=clock, wait=clock.wait_for_one)
    guesses, costs = Steady(clock, claim, learns), Padded(PREDICTED.__getitem__, **overhead)
    let_draft(engine, guesses, *PREDICTED, costs=costs, clock=lambda: clock.now)
    request = make_request("a", list(prompt), seed=3, max_tokens=num_tokens, ignore_eos=True)
    engine.add_request(request)
    seconds = []
    while engine.has_work():
        engine.step(clock.now)
        seconds += [step.seconds for step in engine.ended_steps]
    return runner, seconds, lane.scheduler.lookahead._prices.times


def share_of_large(sizes: list[int]) -> float:
    return sizes.count(LARGE) / len(sizes)


def test_a_size_that_is_as_dear_as_predicted_is_drafted_into():
    runner, _, _ = served(lambda size, number: PREDICTED[size])
    assert share_of_large(runner.sizes[1:-8]) == 1.0


def test_only_what_sizes_cost_beside_each_other_matters():
    """All of it is as many times slower: the larger step goes on to pay, but for trials."""
    runner, _, _ = served(lambda size, number: 20.0 * PREDICTED[size])
    assert share_of_large(runner.sizes[60:-8]) > 0.9


def test_a_size_that_is_cheaper_than_predicted_is_drafted_into():
    runner, _, _ = served(lambda size, number: 0.7 if size == LARGE else 1.0)
    assert share_of_large(runner.sizes[1:-8]) == 1.0


@pytest.mark.parametrize("slower", [1.0, 20.0])
def test_a_size_that_is_dearer_than_predicted_is_left_alone(slower):
    """But for trials, ever so often; with its true price the smaller one is the better."""
    runner, _, _ = served(lambda size, number: slower * (1.5 if size == LARGE else 1.0))
    assert 0 < share_of_large(runner.sizes) < 0.1


def test_a_size_that_was_dear_for_a_while_is_tried_again():
    """As a compiler beside it may make it."""

    def truth(size, number):
        return 1.5 if size == LARGE and number < 100 else PREDICTED[size]

    runner, _, _ = served(truth)
    assert share_of_large(runner.sizes[20:100]) < 0.2
    assert share_of_large(runner.sizes[-200:-8]) == 1.0


def test_the_same_steps_teach_the_same():
    def truth(size, number):
        return PREDICTED[size] * (1 + number * 2654435761 % 97 / 97)

    (first, _, _), (second, _, _) = served(truth), served(truth)
    assert first.sizes == second.sizes
    assert 0 < share_of_large(first.sizes) < 1


def test_predictions_that_are_right_teach_nothing():
    """With the host hidden and not, switches of the mode, and the time that drafts take."""
    overhead = {"host_seconds": 0.2, "switch_seconds": 0.05}
    found = [
        served(
            lambda size, number: PREDICTED[size],
            num_tokens=60,
            claim=claim,
            prompt=[1] * 21,
            learns=True,
            **overhead,
        )
        for claim in (0.8, 0.0)
    ]
    kinds = {kind: times.factor(kind) for _, _, times in found for kind in times._kinds}
    assert {kind.is_hidden for kind in kinds} == {True, False}
    assert {kind.mode for kind in kinds} == {BASE, SHIFT}
    assert list(kinds.values()) == pytest.approx([1.0] * len(kinds), abs=1e-9)


def test_a_step_with_drafts_takes_its_own_time_and_not_that_of_the_one_before():
    runner, seconds, _ = served(lambda size, number: PREDICTED[size], num_tokens=40)
    own = [PREDICTED[size] for size in runner.sizes]
    assert len(set(own)) > 1
    assert all(one - 1e-9 <= took <= one + 0.011 for one, took in zip(own, seconds, strict=True))
