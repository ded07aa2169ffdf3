"""Sizes of steps in pipelines: several steps are on their way at once."""

import statistics

import pytest

from shiftjax.core.policies import make_policy
from shiftjax.core.step_sizes import Demand, Turn
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import TraceRequest, on_off_times, poisson, requests_at
from shiftjax.sizing.cost_sizes import CostSizes, Known, patience_of
from shiftjax.sizing.drain import Queue, _sized

TARGET = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
STAGES = 4


def pipeline(sizes="cost"):
    return deploy(TARGET, f"cost,pp={STAGES},sp=1,tp=2,step_sizes={sizes}")


def sizes_of():
    deployment = pipeline()
    costs = cost_model(TARGET, deployment)
    modes, policy = costs.layout.modes, make_policy("cost", None, costs)
    known = Known(deployment.step_sizes, policy, modes, costs)
    return CostSizes(known), known


def demand(prompts, num_decodes, num_others=0):
    waiting = len(prompts)
    return Demand(Turn(1.0), num_decodes, 0, prompts, 0, 0, waiting, 8192, num_others=num_others)


def test_first_tokens_come_when_the_last_stage_has_them():
    """By hand: 300 tokens in steps of 128 with 28 decodes, one ends each second, three are there.

    The prompts of 100 and 200 tokens end with the first and the third of three steps.
    """
    queue = Queue(28, [100, 300], answer=1.0, num_others=50, depth=3)
    three = _sized([64, 128, 512], 1, queue, lambda i, n: 1.0 if n else 0.25, 0.25)
    assert three.drain == 3 + 2 and three.first == (1 + 2) + 5
    # All 78 decode three steps late at most, once for each token; so does the first prompt.
    assert three.late == 0.75 * (78 * 2 + 2) + 78 * 0.75
    one = _sized([64, 128, 512], 2, queue, lambda i, n: 2.0 if n else 0.25, 0.25)
    assert (one.drain, one.first, one.late) == (6.0, 12.0, 78 * 1.75)


def test_chunks_follow_each_other_unless_decodes_go_along():
    sizes, _ = sizes_of()
    depth = {
        (len(some.prompts), some.num_decodes): sizes._depth(some)
        for some in (demand([(9000, 0)] * n, d) for n in (1, 3, 9) for d in (0, 5))
    }
    assert depth == {(1, 0): 4, (3, 0): 4, (9, 0): 4, (1, 5): 1, (3, 5): 2, (9, 5): 2}


def test_a_prompt_alone_is_cut_so_that_all_stages_compute():
    sizes, known = sizes_of()
    assert sizes.choose(demand([(8192, 0)], 0)) <= 8192 // STAGES
    runs = [replay([TraceRequest(0.0, 8192, 8)], TARGET, pipeline(s)) for s in ("largest", "cost")]
    first = [run.requests[0].ttft for run in runs]
    assert first[1] < 0.6 * first[0]
    patience = patience_of(known)
    assert patience == pytest.approx(2 * first[0] / STAGES / 8192, rel=0.2)  # without attention


def test_decodes_of_other_micro_batches_wait_too():
    """With a prompt beside few decodes, the more others there are, the smaller the step."""
    sizes, _ = sizes_of()
    chosen = [sizes.choose(demand([(3000, 0)] * 4, 4, others)) for others in (0, 60, 240)]
    assert chosen == sorted(chosen, reverse=True) and chosen[0] > chosen[-1]


def test_ends_of_unlike_steps_teach_nothing(monkeypatch):
    learned = []
    monkeypatch.setattr("shiftjax.costs.step_times.StepTimes.learn", lambda *s: learned.append(s))
    replay(poisson(5, 2, 1000, 20, 0), TARGET, pipeline())
    assert not learned
    replay(poisson(5, 2, 1000, 20, 0), TARGET, deploy(TARGET, "cost"))
    assert learned


TRAFFIC = {
    "chat": (lambda: poisson(10, 8, 600, 200, 0, 1.0), 0.05),
    "bursts": (lambda: requests_at(on_off_times(1, 8, 20, 6, 20, 0), 4096, 250, 1.0, 0), 0.05),
}


@pytest.mark.costs(8)
@pytest.mark.parametrize("name", TRAFFIC)
def test_every_mean_is_better_than_with_the_largest_steps(name):
    make, gain = TRAFFIC[name]
    runs = [replay(make(), TARGET, pipeline(sizes)).requests for sizes in ("largest", "cost")]
    for column, least in (("ttft", 0.0), ("tpot", gain), ("completion", gain)):
        before, after = ([v for r in run if (v := getattr(r, column)) is not None] for run in runs)
        assert statistics.mean(after) <= (1 - least) * statistics.mean(before), column
