"""Pipelines in the replay: a step ends in every stage, and the closed forms agree with it."""

from dataclasses import replace

import pytest

from shiftjax.core.policy import work_of
from shiftjax.core.request import Request, ScheduledSequence, SequenceState, StepPlan
from shiftjax.costs.work import Work
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.sim.devices import Clock, CostRunner
from shiftjax.sim.experiments import choose_deployments, target_from
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import TraceRequest

SMALL = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
SHIFT = Mode(1, 1)
SOMEBODY = SequenceState(Request("", ()), 0, 0, (0, 0.0, 0, 0), [], 0, 0, frozenset(), [])


def target(engine: str = "shiftjax") -> Target:
    names = {"model": "llama-8b", "machine": "a10x8", "dtype": "bfloat16"}
    found = target_from(names | {"engine": engine})
    return replace(found, engine=found.engine.offline)


def batch(count: int, num_prompt_tokens: int, num_output_tokens: int) -> list[TraceRequest]:
    return [TraceRequest(0.0, num_prompt_tokens, num_output_tokens)] * count


def test_a_name_says_the_stages_and_the_rest_are_replicas():
    one, four = choose_deployments(target(), ["pp8", "pp2tp2"])
    assert [(each.dp, each.pp, each.sp, each.tp) for each in (one, four)] == [
        (1, 8, 1, 1),
        (2, 2, 1, 2),
    ]
    assert four.mesh == "dp=2 pp=2 sp=1 tp=2"
    assert four.budgets.num_micro_batches == 2
    (shifting,) = choose_deployments(target(), ["sp4tp2"])
    assert (shifting.mesh, shifting.policy) == ("dp=1 sp=4 tp=2", "threshold")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pp3", "8 devices cannot be cut into pp3"),
        ("dp3pp2", "8 devices cannot be cut into dp3pp2"),
        ("pp64", "32 layers"),
        ("sp16tp4", "more than 32 query heads"),
        ("pp0", "unknown deployment 'pp0'"),
    ],
)
def test_names_that_cannot_be_deployed(name, words):
    with pytest.raises(ConfigError, match=words):
        choose_deployments(target(), [name])


def test_a_step_begins_in_a_stage_when_both_before_it_have_ended():
    deployment = deploy(target(), "pp4tp2", **SMALL)
    costs = cost_model(target(), deployment)
    free = {"host_seconds_distributed": 0.0, "host_seconds_per_sequence": 0.0}
    engine = replace(target().engine, host_seconds=0.0, **free)
    runner = CostRunner(deployment.costs(target().machine, engine), Clock())
    chunks = [ScheduledSequence(SOMEBODY, 0, n, 0, -1) for n in (512, 8, 512, 8)]
    plans = [StepPlan([chunk], chunk.num_tokens, 0, 0, [], [], 0) for chunk in chunks]
    done = [runner.run(plan, SHIFT, None)[0] for plan in plans]
    stages = [0.0] * 4
    for plan, got in zip(plans, done, strict=True):
        at = 0.0
        for index, seconds in enumerate(costs.stage_seconds(SHIFT, work_of(plan))):
            at = stages[index] = max(at, stages[index]) + seconds
        assert got == pytest.approx(at)


@pytest.mark.parametrize("engine", ["shiftjax", "vllm"])  # whose host hides, or not
@pytest.mark.parametrize("name", ["pp8", "pp4tp2"])
def test_decodes_in_steady_state_take_the_interval_of_the_closed_form(name, engine):
    of = target(engine)
    deployment, prompt, output = deploy(of, name, **SMALL), 64, 200
    result = replay(batch(64, prompt, output), of, deployment)
    costs = cost_model(of, deployment)
    decodes = [step for step in result.steps if step.num_tokens == 64 // deployment.pp]
    middle = decodes[len(decodes) // 4 : -len(decodes) // 4]
    interval = (middle[-1].done - middle[0].done) / (len(middle) - 1)
    work = Work.decode(64 // deployment.pp, prompt + output // 2)
    assert interval == pytest.approx(costs.seconds(SHIFT, work), rel=0.1)


@pytest.mark.parametrize("engine", ["shiftjax", "vllm"])
def test_prompts_in_steady_state_take_the_interval_of_the_closed_form(engine):
    of = target(engine)
    deployment = deploy(of, "pp8,step_sizes=largest", **SMALL)
    result = replay(batch(64, 512, 1), of, deployment)
    costs = cost_model(of, deployment)
    interval = (result.steps[-1].done - result.steps[8].done) / (len(result.steps) - 9)
    work = Work.prefill(512)
    assert interval == pytest.approx(costs.seconds(SHIFT, work), rel=0.1)


def test_one_request_waits_for_all_stages():
    of = target()
    deployment = deploy(of, "pp8", **SMALL)
    (one,) = replay(batch(1, 100, 50), of, deployment).requests
    costs = cost_model(of, deployment)
    assert one.tpot is not None
    seconds = sum(costs.stage_seconds(SHIFT, Work.decode(1, 125)))
    assert one.tpot == pytest.approx(seconds, rel=0.05)
