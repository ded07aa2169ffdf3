"""What is told of steps beside other modes: the cost model's own numbers, and no other course."""

from dataclasses import replace
from itertools import pairwise

import pytest
from echo_kit import make_engine as make_echo_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from spent import examples, thorough

from shiftjax.core.engine import Engine
from shiftjax.core.policies import make_policy
from shiftjax.core.policy import Policy
from shiftjax.core.request import Request, SamplingParams
from shiftjax.costs.step_times import predicted
from shiftjax.costs.work import Work
from shiftjax.explain.explanation import AS_LARGE, PAGE_SECONDS, UNKNOWN, explain, page_part
from shiftjax.explain.step_samples import EVERY_SECONDS, KEPT, PRICED_AT_ONCE, StepSamples
from shiftjax.parallel.grid import Mode
from shiftjax.sim.devices import Clock
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model, policy_of
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import serve
from shiftjax.sim.sim_backend import make_engine

PLAIN = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
TARGET = replace(PLAIN, engine=replace(PLAIN.engine, switch_seconds=1e-3))
SOME = SamplingParams(max_tokens=60, ignore_eos=True)
SMALL = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}


def requests(num: int, num_tokens: int = 1500, apart: float = 0.1) -> list[Request]:
    return [Request(str(n), [n] * num_tokens, SOME, apart * n) for n in range(num)]


def served(name: str, trace: list[Request], look=None) -> tuple[Engine, Clock, list]:
    """An engine after a trace, with every step that its devices have run; `look` at each turn."""
    clock = Clock()
    engine, runners = make_engine(TARGET, [deploy(TARGET, name, **SMALL)], clock)
    if look is not None:
        turn = engine.step

        def step(now):
            look(engine, now)
            return turn(now)

        engine.step = step
    serve(engine, clock, iter(trace))
    return engine, clock, [step for runner in runners for step in runner.steps]


def samples_of(engine: Engine) -> StepSamples:
    (found,) = (each for each in engine.watchers if isinstance(each, StepSamples))
    return found


@pytest.mark.parametrize("name", ["shift", "cost", "sp", "tp", "dp"])
def test_each_mode_has_the_seconds_of_the_cost_model_for_that_step(name):
    """Those of the mode that ran are what the simulated step took: its devices know them, too."""
    engine, clock, _ = served(name, requests(12))
    deployment = deploy(TARGET, name, **SMALL)
    costs = cost_model(TARGET, deployment)
    policy, modes = policy_of(deployment, costs, costs), engine.lanes[0].modes
    by_label = {mode.label: mode for mode in modes}
    told = explain(engine, clock.now)
    assert told["policy"] == deployment.policy and told["machine"] == "h200x8"
    assert told["unknown"] == "" and told["steps"] and "fleet" not in told
    for step in told["steps"]:
        work, last = Work(**step["work"]), by_label.get(step["last_mode"])
        chosen, step_of = by_label[step["mode"]], (last, work, step["is_hidden"])
        assert [each["mode"] for each in step["predicted"]] == list(by_label)
        for each in step["predicted"]:
            mode = by_label[each["mode"]]
            assert each["seconds"] == predicted(costs, mode, *step_of)
            assert each["is_allowed"] == (mode in policy.modes_used(modes))
        if chosen == last and step["is_hidden"] and len(engine.lanes) == 1:  # the host is its own
            own = next(each for each in step["predicted"] if each["mode"] == chosen.label)
            assert own["seconds"] == pytest.approx(step["measured_seconds"], rel=1e-9)
        assert policy.mode_of(work, modes, step["num_waiting"], last) == chosen
        assert 0 <= step["seconds_ago"] <= clock.now


def test_the_page_has_the_same_seconds_of_every_step_that_was_kept():
    engine, clock, steps = served("shift", requests(30))
    told = page_part(engine, clock.now)["steps"]
    modes = {each["mode"] for each in told}
    assert modes == {"base", "shift"} and len(told) > 6
    assert [each["at"] for each in told] == sorted(each["at"] for each in told)
    for mode in modes:
        ends = [each["at"] for each in told if each["mode"] == mode]
        assert all(b - a >= EVERY_SECONDS for a, b in pairwise(ends))
    sizes = {(step.mode, step.num_tokens) for step in steps}
    by_label = {mode.label: mode for mode in engine.lanes[0].modes}
    for each in told:
        assert (by_label[each["mode"]], each["tokens"]) in sizes
        assert set(each["predicted"]) == {"base", "shift"}
    last = {each["mode"]: each for each in told}
    for step in explain(engine, clock.now)["steps"]:
        page, took = last[step["mode"]], {e["mode"]: e["seconds"] for e in step["predicted"]}
        assert page["reason"] == step["reason"]
        assert page["predicted"] == {mode: round(each, 6) for mode, each in took.items()}


@pytest.mark.parametrize("name", ["shift", "fleet:load", *thorough("cost", "fleet")])
@settings(max_examples=examples(12), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=8),
    apart=st.floats(0.0, 0.3),
    share=st.integers(1, 9),
)
def test_looking_changes_nothing(name, sizes, apart, share):
    """The same steps in the same modes at the same times, whoever looks how often."""
    trace = [Request(str(n), [n] * size, SOME, apart * n) for n, size in enumerate(sizes)]
    turns = 0

    def look(engine, now):
        nonlocal turns
        turns += 1
        if turns % share == 0:
            explain(engine, now)
            page_part(engine, now)

    seen, unseen = served(name, trace, look), served(name, trace)
    assert seen[2] == unseen[2] and seen[1].now == unseen[1].now
    assert seen[0].stats().steps == unseen[0].stats().steps
    assert seen[0].stats().mode_switches == unseen[0].stats().mode_switches


def test_nothing_is_priced_until_somebody_looks_and_then_a_bounded_number():
    engine, clock, _ = served("shift", requests(400, 200, 0.2))
    samples = samples_of(engine)
    kept = list(samples._kept.values())
    assert not any(sample.is_priced for each in kept for sample in each)
    assert all(0 < len(each) <= KEPT for each in kept)
    recent = [s for each in kept for s in each if s.at > clock.now - PAGE_SECONDS]
    assert len(recent) > 2 * PRICED_AT_ONCE
    looks = [len(page_part(engine, clock.now)["steps"]) for _ in range(20)]
    assert looks[0] == PRICED_AT_ONCE and looks[1] == 2 * PRICED_AT_ONCE
    assert looks[-1] == len(recent)


def test_without_costs_it_says_so():
    engine = make_echo_engine()
    engine.watchers = [StepSamples()]
    engine.add_request(Request("a", [3] * 20, SamplingParams(max_tokens=4)))
    now = 0.0
    while engine.has_work():
        engine.step(now)
        now += 1.0
    told = explain(engine, now)
    assert told["machine"] == "" and told["unknown"] == UNKNOWN
    assert told["sizes"] == [] and told["sizes_unknown"] == AS_LARGE
    assert told["steps"] and all(each["predicted"] == [] for each in told["steps"])
    assert all("threshold" in each["reason"] for each in told["steps"])
    part = page_part(engine, now)
    assert part["unknown"] == UNKNOWN and all(not each["predicted"] for each in part["steps"])


def test_the_last_size_of_each_group_is_told_beside_others():
    engine, clock, _ = served("shift", requests(20))
    (told,) = explain(engine, clock.now)["sizes"]
    states = [lane.scheduler.sizes.told.last for lane in engine.lanes]
    (choice,) = states
    assert (told["first"], told["width"], told["reason"]) == (0, 8, choice.reason)
    assert [row["tokens"] for row in told["sizes"]] == sorted(
        {choice.chosen.tokens, choice.largest.tokens, choice.smallest.tokens}, reverse=True
    )
    (chosen,) = (row for row in told["sizes"] if row["is_chosen"])
    assert chosen["tokens"] == choice.chosen.tokens
    assert explain(engine, clock.now)["sizes_unknown"] == ""


# ------------------------------------------------------------------ reasons

BASE, BETWEEN, SHIFT = MODES = Mode(8, 8), Mode(8, 2), Mode(8, 1)


def test_reasons_of_the_policies():
    few, many = Work.decode(1, 100), Work.prefill(3000)
    threshold = make_policy("threshold", 256)
    used = threshold.modes_used(MODES)
    assert threshold.reason(SHIFT, few, used, None) == "1 token, up to the threshold of 256"
    assert (
        threshold.reason(BASE, many, used, None) == "3,000 tokens, more than the threshold of 256"
    )
    assert threshold.reason(BASE, many, used[:1], None) == "the only mode"
    assert make_policy("base", None).reason(BASE, few, MODES[:1], None) == "always base"
    costs = cost_model(TARGET, deploy(TARGET, "sp=8,tp=1,policy=cost"))
    cost = make_policy("cost", None, costs)
    assert cost.reason(SHIFT, few, MODES, SHIFT) == "predicted to be quickest"
    kept = "shift would be quicker by less than a switch is worth"
    assert cost.reason(BETWEEN, few, MODES, BETWEEN) == kept
    assert cost.reason(BASE, few, MODES, SHIFT).startswith(
        "shift is predicted to be quicker by now"
    )


def test_a_policy_that_gives_no_reason_is_named():
    policy = make_policy("threshold", 8)
    assert Policy.reason(policy, BASE, Work.decode(1, 1), MODES, None) == "policy threshold"
