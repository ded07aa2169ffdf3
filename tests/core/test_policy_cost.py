"""The cost policy: the cheaper mode, with hysteresis, and what the queue changes."""

from dataclasses import dataclass, replace

import pytest
from engines import checkpoint, make, run

from shiftjax.core.policies import CostPolicy, make_policy
from shiftjax.core.request import SamplingParams, StepPlan
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.machine_files import dump_machine, load_engine, load_machine
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Group, Mode

PLAN = StepPlan([], 8, 0, 0, [], [], 0)
BASE, SHIFT = Mode(2, 2), Mode(2, 1)
ENGINE = load_engine("shiftjax")


@dataclass
class Costs:
    """Stands for a cost model that predicts these seconds whatever the size."""

    base: float
    shift: float
    engine: object = ENGINE

    def size_of(self, work):
        return work.num_tokens, work.num_rows

    def mode_seconds(self, mode, size):
        return self.base if mode == BASE else self.shift


def choose(base, shift, last, num_waiting=0, **overhead):
    costs = Costs(base, shift, replace(ENGINE, **overhead))
    return CostPolicy(costs, margin=0.1).choose(PLAN, (BASE, SHIFT), num_waiting, last)  # pyright: ignore


def test_without_a_past_the_quicker_mode_wins():
    assert choose(1.0, 1.01, None) == BASE
    assert choose(1.01, 1.0, None) == SHIFT


@pytest.mark.parametrize(("last", "other"), [(BASE, SHIFT), (SHIFT, BASE)])
def test_a_switch_must_save_more_than_the_margin(last, other):
    def seconds(gain):
        pair = {last: 1.0 + gain, other: 1.0}
        return pair[BASE], pair[SHIFT]

    assert choose(*seconds(0.09), last) == last
    assert choose(*seconds(0.11), last) == other
    assert choose(*seconds(0.11), last, switch_seconds=0.02) == last
    assert choose(*seconds(0.13), last, switch_seconds=0.02) == other


def test_a_queue_makes_base_easy_to_enter_and_shift_hard():
    assert choose(1.0, 1.01, SHIFT, num_waiting=0) == SHIFT
    assert choose(1.0, 1.01, SHIFT, num_waiting=3) == BASE
    assert choose(1.15, 1.0, BASE, num_waiting=0) == SHIFT
    assert choose(1.15, 1.0, BASE, num_waiting=3) == BASE
    assert choose(1.25, 1.0, BASE, num_waiting=3) == SHIFT


def test_what_it_may_choose_is_what_some_queue_and_some_step_before_lead_to():
    def wanted(base, shift):
        policy = CostPolicy(Costs(base, shift), margin=0.1)  # pyright: ignore
        return policy.wanted((BASE, SHIFT), 1, Bucket(8, 8))

    assert wanted(2.0, 1.0) == [SHIFT]
    assert wanted(1.0, 2.0) == [BASE]
    assert wanted(1.05, 1.0) == [BASE, SHIFT]  # who is in BASE stays
    assert wanted(1.15, 1.0) == [BASE, SHIFT]  # and so while others wait


def test_a_mode_between_competes_with_both():
    modes = Group(0, 4).modes
    seconds = {4: 3.0, 2: 1.0, 1: 2.0}

    class Three(Costs):
        def mode_seconds(self, mode, size):
            return seconds[mode.sp]

    policy = CostPolicy(Three(0.0, 0.0), margin=0.1)  # pyright: ignore
    assert policy.choose(PLAN, modes, 0, None) == policy.choose(PLAN, modes, 0, modes[0])
    assert policy.choose(PLAN, modes, 0, None).label == "sp2"
    assert policy.wanted(modes, 1, Bucket(8, 8)) == [Mode(4, 2)]


def test_the_cost_policy_needs_a_cost_model():
    with pytest.raises(ValueError, match="cost model"):
        make_policy("cost", 0)


def test_an_engine_serves_with_it(tmp_path):
    directory, _, _ = checkpoint(num_hidden_layers=1)
    machine = load_machine("h200x8")
    way = replace(machine.all_reduce[-1], latency_seconds=1.0)
    tokens = {}
    # Where exchanges take forever only SHIFT pays, where reductions do only BASE.
    for mode, kind in ((SHIFT, "all_to_all"), (BASE, "all_reduce")):
        path = tmp_path / f"{mode.label}.yaml"
        path.write_text(dump_machine(replace(machine, **{kind: (way,)}), "a test"))
        options = {"token_buckets": [32], "policy": "cost", "machine": str(path)}
        engine = make(directory, 2, 1, **options).engine
        greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        events = run(engine, [[5, 6, 7] * 9, [9] * 4], [greedy] * 2)
        tokens[mode] = [[t for e in some for t in e.token_ids] for some in events.values()]
        steps = engine.stats().steps_by_mode
        assert steps.pop(mode.label) >= 6 and not any(steps.values())
    assert tokens[SHIFT] == tokens[BASE]


def test_an_unknown_machine_is_refused():
    directory, _, _ = checkpoint()
    with pytest.raises(ConfigError, match="unknown machine 'abacus'"):
        make(directory, 2, 1, policy="cost", machine="abacus")
