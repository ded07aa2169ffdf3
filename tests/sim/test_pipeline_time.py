"""Pipelines in virtual seconds: the engine's steps end when those of a replay by hand do."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from closed_loop import ends_of_steps
from echo_kit import make_engine
from time_kit import of_tokens

from shiftjax.sim.devices import Clock, CostRunner
from shiftjax.sim.replay import serve

STAGES = [
    (1.0, 1.0, 1.0),
    (1.0, 3.0, 2.0),  # the slowest is neither the first nor the last
    (4.0, 1.0),
]


def ends_in_the_engine(stages: Sequence[float], host: float, overlap: bool, requests, **options):
    """When its steps end on devices that take these seconds for any step."""
    clock = Clock()
    costs = SimpleNamespace(
        stages=stages,
        stage_seconds=lambda mode, work: list(stages),
        host_seconds=lambda work: host,
        engine=SimpleNamespace(switch_seconds=0.0, replicas_in_step=False),
    )
    engine = make_engine(num_micro_batches=len(stages), overlap=overlap, clock=clock, **options)
    (lane,) = engine.lanes
    runner = lane.runner = CostRunner(costs, clock)
    serve(engine, clock, requests)
    return [step.done for step in runner.steps]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host", [0.0, 0.75, 2.5])
@pytest.mark.parametrize("stages", STAGES)
def test_decodes_of_micro_batches_fill_all_stages(stages, host, overlap):
    """Pipelining: each step takes 1/PP of the sequences, and no micro-batch waits for another's."""
    num = len(stages)
    requests = [of_tokens(str(n), 20, prompt=(1, 2)) for n in range(2 * num)]
    ends = ends_in_the_engine(stages, host, overlap, requests, max_num_seqs=2 * num)
    assert ends == pytest.approx(ends_of_steps(stages, host, num + overlap, 20 * num, num))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host", [0.0, 0.75])
@pytest.mark.parametrize("stages", STAGES)
def test_one_sequence_waits_for_each_token_in_all_stages(stages, host, overlap):
    """Pipelining gains nothing for one: the next step begins when the last stage has its token."""
    ends = ends_in_the_engine(stages, host, overlap, [of_tokens("a", 20)])
    assert ends == pytest.approx(ends_of_steps(stages, host, 1 + overlap, 20, 1))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host", [0.0, 0.75, 2.5])
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("num_prompts", [1, 15])  # one in chunks, or one in each step
def test_prompts_follow_each_other_without_waiting_for_tokens(stages, host, overlap, num_prompts):
    """Pipelining of prompts: as many steps in flight as stages, and one that is prepared."""
    num_steps = 5 if num_prompts == 1 else num_prompts
    prompt = [3] * (8 * num_steps // num_prompts)
    requests = [of_tokens(str(n), 1, prompt=prompt) for n in range(num_prompts)]
    options = {"max_num_batched_tokens": 8, "prefix_caching": False}
    ends = ends_in_the_engine(stages, host, overlap, requests, **options)
    assert ends == pytest.approx(ends_of_steps(stages, host, len(stages) + overlap, num_steps))
