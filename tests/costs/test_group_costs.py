"""Steps through stages: against sums by hand, and what must hold of any machine."""

from dataclasses import replace

import pytest
from closed_loop import ends_of_steps, interval

from shiftjax.arch.config import stages_of
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import num_parameters
from shiftjax.costs.group_costs import PipelineCosts
from shiftjax.costs.machine import Transfer
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

MODEL, SHIFT = PRESETS["llama-8b"], Mode(1, 1)
DECODE, PREFILL = Work.decode(64, 2048), Work.prefill(4096)
FREE = (Transfer(0.0, 1e30),)


def costs_of(pp: int, tp: int = 1, **machine) -> PipelineCosts:
    constants = replace(load_machine("a100x8"), **machine)
    engine = replace(load_engine("vllm"), host_seconds=0.0, host_seconds_distributed=0.0)
    engine = replace(engine, host_seconds_per_sequence=0.0)
    models = stages_of(MODEL, pp)
    return PipelineCosts(
        [CostModel(Layout(m, 1, tp), constants, engine, Formats()) for m in models]
    )


@pytest.mark.parametrize("work", [DECODE, PREFILL])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_takes_the_sum_of_its_stages_and_one_ends_with_the_slowest(work, tp):
    """Without links and kernels that cost time, stages take what one stage takes."""
    free = {"point_to_point": FREE, "all_gather": FREE, "kernel_seconds": 0.0}
    one, four = costs_of(1, tp, **free), costs_of(4, tp, **free)
    whole = one.serial_seconds(SHIFT, work)
    assert whole == one.seconds(SHIFT, work) == one.stages[0].seconds(SHIFT, work)
    assert four.serial_seconds(SHIFT, work) == pytest.approx(whole, rel=1e-9)
    slowest = max(four.stage_seconds(SHIFT, work))
    assert four.seconds(SHIFT, work) == slowest > whole / 4


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("host", [0.0, 0.5, 0.9, 2.0, 20.0])  # of the slowest stage
def test_one_step_ends_as_often_as_in_a_replay_by_hand(host, pp, overlaps):
    """Pipelining of decode steps: the least interval that stages, host and steps in flight allow.

    Up to S + 1 steps are in flight where the host prepares one while others are, else S.
    """
    costs = costs_of(pp)
    stages = costs.stage_seconds(SHIFT, DECODE)
    engine = replace(costs.engine, host_seconds=host * max(stages), overlaps=overlaps)
    for stage in costs.stages:
        stage.engine = engine
    costs = PipelineCosts(costs.stages)
    in_flight = pp + overlaps
    ends = ends_of_steps(stages, host * max(stages), in_flight, 100 * in_flight)
    assert costs.seconds(SHIFT, DECODE) == pytest.approx(interval(ends, in_flight), rel=1e-9)
    assert costs.serial_seconds(SHIFT, DECODE) == pytest.approx(ends[0], rel=1e-9)


@pytest.mark.parametrize("is_hidden", [True, False])
@pytest.mark.parametrize("num_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("host", [0.0, 0.5, 2.0, 20.0])  # of the slowest stage
def test_few_micro_batches_wait_for_their_tokens_and_not_for_a_full_pipeline(
    host, num_batches, is_hidden
):
    """Each has one step in flight, or one more that waits for the token of the first."""
    costs = costs_of(4)
    stages = costs.stage_seconds(SHIFT, DECODE)
    for stage in costs.stages:
        stage.engine = replace(costs.engine, host_seconds=host * max(stages))
    costs = PipelineCosts(costs.stages)
    in_flight = min(2 * num_batches, 5) if is_hidden else num_batches
    by_hand = stages, host * max(stages), in_flight, 40 * in_flight * num_batches, num_batches
    wanted = interval(ends_of_steps(*by_hand), in_flight * num_batches)
    found = costs.paced_seconds(SHIFT, DECODE, num_batches, is_hidden=is_hidden)
    assert found == pytest.approx(wanted, rel=1e-9)


def test_guesses_take_their_time_in_the_last_stage():
    costs, guess = costs_of(4), 3e-3
    costs.stages[-1].guess_seconds = lambda num_sequences: guess * num_sequences
    *others, last = costs.stage_seconds(SHIFT, DECODE)
    full = costs.paced_seconds(SHIFT, DECODE, 4, 8, is_hidden=True)
    assert full == last + 8 * guess > max(others)
    alone = costs.paced_seconds(SHIFT, DECODE, 1, 8, is_hidden=True)
    assert alone == pytest.approx(sum(others) + last + 8 * guess)


def test_each_device_sends_its_part_at_every_boundary():
    way = (Transfer(1e-3, 1e9),)
    slow, free = (costs_of(4, 2, point_to_point=ways) for ways in (way, FREE))
    one_way = 1e-3 + 4096 * MODEL.hidden_size * 2 / 2 / 1e9
    assert slow.send_seconds(PREFILL) == pytest.approx(one_way)
    late = slow.serial_seconds(SHIFT, PREFILL) - free.serial_seconds(SHIFT, PREFILL)
    assert late == pytest.approx(3 * one_way)


def test_modes_are_compared_by_all_but_attention():
    pipeline = costs_of(4, 2)
    cost = pipeline.breakdown(SHIFT, PREFILL)
    seconds = pipeline.mode_seconds(SHIFT, pipeline.size_of(PREFILL))
    assert seconds == pytest.approx(cost.device - cost.attention)


def test_only_the_last_stage_pays_for_logit_rows():
    stages = costs_of(4).stages
    more = DECODE._replace(num_rows=2 * DECODE.num_rows)
    added = [one.device_seconds(SHIFT, more) - one.device_seconds(SHIFT, DECODE) for one in stages]
    assert added[:-1] == [0.0, 0.0, 0.0] and added[-1] > 0.0


@pytest.mark.parametrize("pp", [2, 3, 5, 32])
def test_stages_have_every_parameter_once_but_a_tied_head(pp):
    for model in (MODEL, PRESETS["smollm2-135m"]):
        stages = stages_of(model, pp if pp < 32 else model.num_layers)
        counts = [stage.num_layers for stage in stages]
        assert sum(counts) == model.num_layers and counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1
        twice = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
        assert sum(map(num_parameters, stages)) == num_parameters(model) + twice


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="32 layers cannot be cut into 33 stages"):
        stages_of(MODEL, 33)
