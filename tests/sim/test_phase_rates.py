"""Stages and phases in closed form: against sums by hand, and what must hold of any machine."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from closed_loop import ends_of_steps, interval
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.costs.work import Work
from shiftjax.options import ConfigError
from shiftjax.parallel.degrees import Degrees
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model
from shiftjax.sim.named import deploy
from shiftjax.sim.phase_choice import LEAST_GAIN, choose_phases
from shiftjax.sim.phase_rates import Batch, _most_of, all_degrees, phased, rates_of, static_seconds

ARTICLES = [(3000, 200)] * 2000
HOST = 400 * 2**30


def target(machine="a10x8", model="codellama-34b", engine="vllm"):
    names = {"model": model, "machine": machine, "engine": engine, "dtype": "bfloat16"}
    return target_from(names)


def rates(one, degrees, lengths=ARTICLES):
    found = rates_of(one, deploy(one, degrees.name), Batch.of(lengths))
    assert found is not None
    return found


def test_a_batch_by_its_means():
    batch = Batch.of([(100, 1), (300, 11)])
    assert batch[:3] == (2, 200, 5)
    assert batch.attended == (100 * 50 + 300 * 150) / 400
    assert batch.resident == 300 + 11 / 2  # nothing of the first is decoded
    assert Batch.of([(100, 1)]).resident == 100


def test_one_stage_computes_prompts_as_a_plain_replica():
    one, degrees = target("a100x8", "llama-8b"), Degrees(4, tp=2)
    costs = cost_model(one, deploy(one, degrees.name))
    work = Work(8192, 3, 3, 0, 8192, 8192 * 1500)
    expected = 4 * 8192 / costs.seconds(costs.layout.shift, work)
    assert rates(one, degrees).prefill == pytest.approx(expected)


def test_stages_share_the_layers_and_pay_for_the_sending():
    one = target("a100x8", "llama-8b")
    link = replace(one.machine.point_to_point[0], latency_seconds=0.0, bytes_per_second=1e30)
    free = replace(one, machine=replace(one.machine, point_to_point=(link,)))
    one_stage, four = (rates(free, Degrees(8 // pp, pp)).prefill * pp / 8 for pp in (1, 4))
    assert 3 < four / one_stage < 4  # the last stage has the LM head, and the host is not split
    assert rates(one, Degrees(2, 4)).prefill / 2 < four


def test_weights_that_leave_no_room_decode_nothing():
    one = target()
    assert rates_of(one, deploy(one, "dp8"), Batch.of(ARTICLES)) is None
    with pytest.raises(ConfigError, match="does not fit l4x8 in any number of stages"):
        choose_phases(target("l4x8", "llama-405b"), ARTICLES, HOST)


@pytest.mark.parametrize("engine", ["shiftjax", "vllm"])  # whose host hides, or not
@pytest.mark.parametrize("degrees", [Degrees(pp=8), Degrees(pp=4, tp=2), Degrees(tp=8)])
@pytest.mark.parametrize("num", [1, 3, 64])
def test_a_round_of_decodes_takes_as_long_as_in_a_replay_by_hand(num, degrees, engine):
    """Pipelined decodes: the micro-batches share the stages, and one alone waits for its tokens."""
    one, lengths = target("a100x8", "llama-8b", engine), [(512, 100)] * num
    found, costs = rates(one, degrees, lengths), cost_model(one, deploy(one, degrees.name))
    batches = min(degrees.pp, num)
    work = Work.decode(math.ceil(num / batches), round(Batch.of(lengths).resident))
    stages, host = costs.stage_seconds(costs.layout.shift, work), costs.host_seconds(work)
    overlaps = costs.engine.overlaps
    in_flight = min(batches * (1 + overlaps), degrees.pp + overlaps)
    period = batches * in_flight
    ends = ends_of_steps(stages, host, in_flight, 200 * period, batches)
    assert found.running == num
    assert found.round_seconds == pytest.approx(batches * interval(ends, period), rel=1e-9)


@pytest.mark.parametrize("engine", ["shiftjax", "vllm"])
@pytest.mark.parametrize("degrees", [Degrees(pp=8), Degrees(pp=4, tp=2), Degrees(tp=8)])
def test_a_batch_of_prompts_takes_as_long_as_in_a_replay_by_hand(degrees, engine):
    """Pipelined prompts: full steps at the interval, and the stages fill and empty once."""
    one = target("a100x8", "llama-8b", engine)
    deployment = deploy(one, degrees.name)
    tokens, costs = deployment.max_num_batched_tokens, cost_model(one, deployment)
    lengths = [(tokens, 1)] * 16
    work = Work(tokens, 1, 1, 0, tokens, tokens * tokens // 2)
    stages, host = costs.stage_seconds(costs.layout.shift, work), costs.host_seconds(work)
    ends = ends_of_steps(stages, host, degrees.pp + costs.engine.overlaps, 16)
    seconds = static_seconds(rates(one, degrees, lengths), Batch.of(lengths))
    # Where the host does not overlap, S steps come at once, and the closed form has their mean.
    assert seconds == pytest.approx(ends[-1], rel=1e-9 if costs.engine.overlaps else 2e-3)


def test_the_largest_of_several_poisson_numbers():
    found = list(_most_of(4, 0.7))
    term, below = math.exp(-0.7), 0.0
    brute = []
    for number in range(len(found)):
        below += term
        brute.append(below**4)
        term *= 0.7 / (number + 1)
    assert found == pytest.approx([brute[0], *(b - a for a, b in pairwise(brute))])
    assert sum(found) == pytest.approx(1, abs=1e-3)


def test_mixed_steps_of_a_pipeline_lose_what_phases_do_not():
    """S steps take S times the longest, so a few prompts make all decodes wait."""
    eight, one = rates(target(), Degrees(pp=8)), rates(target(), Degrees(tp=8))
    batch = Batch.of(ARTICLES)
    apart = [
        1 / (batch.prompt / each.prefill + batch.output * each.round_seconds / each.running)
        for each in (eight, one)
    ]
    assert eight.mixed < 0.5 * apart[0]
    assert one.mixed == pytest.approx(apart[1], rel=0.02)


def test_phases_add_up():
    one, batch = target(), Batch.of(ARTICLES)
    prefill, decode = rates(one, Degrees(pp=8)), rates(one, Degrees(tp=8))
    found = phased(prefill, decode, batch, HOST)
    assert found is not None
    token_bytes = 2 * 48 * 8 * 128 * 2
    assert found.cycle == int(HOST / (3000 * token_bytes))
    cycles = math.ceil(2000 / found.cycle)
    assert found.num_switches == 2 * cycles - 1
    seconds = 2000 * 3000 / prefill.prefill + cycles * prefill.fill_seconds
    assert found.prefill_seconds == pytest.approx(seconds)
    rounds = 2000 / decode.running * 199
    assert found.decode_seconds == pytest.approx(rounds * decode.round_seconds)
    load = 68e9 / 8 / 14e9  # of the weights; the last stage has the LM head, too
    assert load < found.one_switch < 1.2 * load
    parts = found.prefill_seconds, found.decode_seconds, found.num_switches * found.one_switch
    assert found.seconds == pytest.approx(sum(parts))


@pytest.mark.parametrize(("machine", "least"), [("a10x8", 1.2), ("a100x8", 1.0)])
def test_phases_gain_where_links_are_slow(machine, least):
    choice = choose_phases(target(machine), ARTICLES, HOST)
    gain = choice.static.seconds / choice.chosen.seconds
    assert gain >= least
    assert (choice.chosen.phases is not None) == (gain > 1)
    if machine == "a100x8":
        assert gain < 1.2


def test_who_writes_nothing_needs_no_phases():
    choice = choose_phases(target(), [(3000, 1)] * 2000, HOST)
    assert choice.chosen is choice.static and choice.static.prefill == Degrees(dp=2, pp=4)
    assert choice.reason.startswith("dp2pp4, without phases: dp2pp4:")
    assert choice.lines()[-1] == choice.reason


def test_a_gain_that_may_be_an_error_is_left(monkeypatch):
    monkeypatch.setattr("shiftjax.sim.phase_choice.LEAST_GAIN", 0.9)
    choice = choose_phases(target(), ARTICLES, HOST)
    assert choice.chosen is choice.static is not choice.ranked[0]
    assert "less than 90% may be an error" in choice.reason


def test_a_batch_of_a_few_requests_does_not_pay_for_a_switch():
    choice = choose_phases(target(), ARTICLES, HOST)
    assert choice.chosen.phases is not None and choice.break_even > 1
    few = choose_phases(target(), ARTICLES[: int(choice.break_even)], HOST)
    assert few.chosen.phases is None
    assert "without phases" in few.reason


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6000), st.integers(1, 2000)), min_size=1, max_size=50),
    st.sampled_from([0, 2**30, HOST]),
)
def test_the_choice_is_the_quickest_that_is_worth_it(lengths, host_bytes):
    choice = choose_phases(target(), lengths * 20, host_bytes)
    seconds = [one.seconds for one in choice.ranked]
    assert seconds == sorted(seconds)
    statics = [one for one in choice.ranked if one.phases is None]
    assert choice.static is statics[0] and choice.chosen in choice.ranked
    if choice.chosen.phases is None:
        assert choice.chosen is choice.static
        assert choice.static.seconds * (1 - LEAST_GAIN) <= seconds[0]
    else:
        assert choice.chosen is choice.ranked[0]
    assert host_bytes or len(statics) == len(seconds)
    for one in choice.ranked:
        if one.phases is not None:
            assert one.prefill.dp == one.decode.dp and one.seconds == one.phases.seconds


def test_a_machine_whose_host_links_nobody_knows():
    one = target()
    unknown = replace(one, machine=replace(one.machine, to_host=()))
    with pytest.raises(ConfigError, match="a10x8 has no to_host and from_host"):
        choose_phases(unknown, ARTICLES, HOST)
    assert choose_phases(unknown, ARTICLES, 0).chosen.phases is None


def test_every_division_of_the_machine_is_there():
    degrees = all_degrees(target())
    assert len(degrees) == len(set(degrees)) == 20
    assert all(each.num_devices == 8 for each in degrees)
