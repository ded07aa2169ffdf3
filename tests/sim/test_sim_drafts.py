"""Drafts in the simulator: as right as they are said to be, the engine's own decisions, no loss."""

from dataclasses import replace

import pytest
from spent import thorough
from test_same_decisions import ARRIVALS, OUTPUTS, PROMPTS, Recorder, step_seconds

from shiftjax.arch.formats import Formats
from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.request import Request, SamplingParams
from shiftjax.core.scheduler import Scheduler
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.step_times import StepTimes
from shiftjax.costs.work import Work
from shiftjax.draft_options import NO_DRAFTS, DraftOptions
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import Speculation
from shiftjax.options import ConfigError
from shiftjax.sim.drafts import WRONG, AcceptanceModel, ModelledDrafting, acceptance_from
from shiftjax.sim.echo import EchoRunner, echo_token
from shiftjax.sim.modelled import Target, cost_model, memory_of, modes_of, policy_of
from shiftjax.sim.models import find_model
from shiftjax.sim.named import deploy, standard_deployments
from shiftjax.sim.replay import Clock, CostRunner, replay, serve
from shiftjax.sim.replay_metrics import summary
from shiftjax.sim.trace import TraceRequest, poisson

H200 = Target(
    find_model("llama-70b"),
    load_machine("h200x8"),
    load_engine("shiftjax").offline,
    Formats("fp8", "fp8"),
)
NO_SWITCH = replace(H200, machine=replace(H200.machine, switch_sum=()))
SMALL = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}


def deployment(name: str, choice: str | None, target: Target = H200, most: int = 16):
    drafts = {}
    if choice is not None:
        fixed = {"fixed_drafts": True, "draft_max_seqs": 0}
        options = fixed if choice == "fixed" else {"draft_choice": choice}
        options = DraftOptions(speculation="suffix", max_draft_tokens=most, **options)
        drafts = {"drafts": options}
    return standard_deployments(target, (name,), **SMALL, **drafts)[name]


def row(trace, name, choice=None, acceptance=None, target=H200, most=16):
    wanted = deployment(name, choice, target, most)
    return summary(replay(trace, target, wanted, acceptance=acceptance))


@pytest.mark.parametrize(("tokens", "share"), [(1.56, 0.25), (4.77, 0.78), (1.2, 0.9), (3.0, 1.0)])
def test_the_figures_of_a_replay_come_out_again(tokens, share):
    figures = {"tokens_per_step": tokens, "accepted_of_drafted": share}
    found = row([TraceRequest(0.0, 9, 4000)], "tp", "fixed", acceptance_from(figures))
    steps = found["steps_base"] + found["steps_shift"]
    assert 4000 / steps == pytest.approx(tokens, rel=0.04)
    assert found["accepted_tokens"] / found["drafted_tokens"] == pytest.approx(share, rel=0.06)
    assert found["accepted_per_step"] == pytest.approx(tokens - 1, rel=0.1)


def test_rates_are_by_place():
    model = acceptance_from([1.0, 0.5, 0.0])
    found = row([TraceRequest(0.0, 9, 4000)], "tp", "fixed", model, most=8)
    assert found["accepted_per_step"] == pytest.approx(1.5, rel=0.03)
    assert acceptance_from("0.7") == acceptance_from(0.7) == AcceptanceModel((0.7,))


def test_bad_luck_at_the_start_is_not_the_end_of_drafts():
    """The first three drafts are wrong, and what is left of the claims would not pay."""
    trace = [TraceRequest(0.0, 1024, 1500)]
    found = row(trace, "cost", "auto", AcceptanceModel((0.3,)))
    assert found["accepted_per_step"] > 0.25


@pytest.mark.parametrize(
    "wrong",
    [1.2, -0.1, "much", [], [0.5, 2], {"tokens_per_step": 2}, None, float("nan")]
    + [{"tokens_per_step": t, "accepted_of_drafted": s} for t, s in ((0.5, 0.5), (2, 0), (2, 1.1))],
)
def test_an_acceptance_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="acceptance must be a probability"):
        acceptance_from(wrong)


def test_drafts_need_an_acceptance_and_something_to_fill():
    trace = [TraceRequest(0.0, 9, 2)]
    with pytest.raises(ConfigError, match="how often they are right"):
        row(trace, "tp", "fixed")
    vllm = replace(H200, engine=load_engine("vllm"))
    with pytest.raises(ConfigError, match="pads no steps"):
        row(trace, "tp", "fill", AcceptanceModel((0.5,)), vllm)
    assert row(trace * 9, "tp", "auto", AcceptanceModel((0.5,)), vllm)["failed"] == 0


def test_drafting_takes_the_hosts_time():
    quick, slow = (
        replace(H200, engine=replace(H200.engine, draft_seconds=seconds)) for seconds in (0.0, 1e-3)
    )
    never = AcceptanceModel((0.0,))
    trace = [TraceRequest(0.0, 9, 101)]
    rows = [row(trace, "tp", "fixed", never, target) for target in (quick, slow)]
    steps, (before, after) = 99, [found["seconds"] for found in rows]
    assert after - before == pytest.approx(steps * 1e-3, rel=0.02)


# ------------------------------------------------------------------ the engine's own decisions


class Echoed(ModelledDrafting):
    """The same drafts for an echo runner: its own tokens where they are right."""

    def draft(self, name, most):
        if (found := super().draft(name, most)) is None:
            return None
        tokens, last = [], name.token_ids[-1]
        for place, guess in enumerate(found.tokens):
            position = len(name.token_ids) - 1 + place
            last = (echo_token(last, position, name.seed, 13) + (guess == WRONG)) % 13
            tokens.append(last)
        return found._replace(tokens=tokens)


@pytest.mark.parametrize("policy", ["threshold", "cost"])
def test_the_simulator_drafts_as_an_engine_does(policy):
    """Lengths, modes and steps, with runners that sample tokens of their own."""
    name = "shift" if policy == "threshold" else "cost"
    sized = deployment(name, "auto").with_blocks(60, memory_of(H200, deployment(name, "auto")))
    costs = cost_model(H200, sized)
    recorded = []
    for kind in (ModelledDrafting, Echoed):
        clock, plans = Clock(), []
        drafting = kind(sized.drafts, AcceptanceModel((0.7,)), 0.0)
        if kind is Echoed:
            runner = EchoRunner(13, num_blocks=60, block_size=sized.block_size, check=True)
            runner = Recorder(runner, clock, plans, step_seconds)
        else:
            no_host = replace(costs.engine, host_seconds=0.0, host_seconds_per_sequence=0.0)
            free = sized.costs(H200.machine, no_host)
            runner = CostRunner(free, clock)
            runner.step_seconds = step_seconds
            runner = Recorder(runner, clock, plans, None)
        modes, chosen = modes_of(costs, sized), policy_of(sized, costs, costs)
        speculation = Speculation(
            drafting,
            Prices(sized.step_sizes, chosen, modes, costs),
            max_rows=128,
            clock=drafting.clock,
        )
        lane = Lane(Scheduler(sized.budgets, speculation), runner, modes)
        engine = Engine([lane], chosen, sized.limits, clock=clock, wait=clock.wait_for_one)
        greedy = [
            SamplingParams(temperature=0.0, max_tokens=3 * n, ignore_eos=True) for n in OUTPUTS
        ]
        traffic = zip(PROMPTS, greedy, ARRIVALS, strict=True)
        requests = [Request(str(n), *request) for n, request in enumerate(traffic)]
        serve(engine, clock, requests)
        recorded.append([(at, mode, [s[:4] for s in plan]) for at, mode, plan in plans[0]])
        assert speculation.stats.num_drafts > 10
    assert recorded[0] == recorded[1]


# ------------------------------------------------------------------ what drafts are worth


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_drafts_gain_at_low_load(rate):
    trace = poisson(0.5, 10.0, 600, 60)
    for name in ("sp", "tp", "shift", "cost"):
        plain = row(trace, name)["completion_mean_seconds"]
        assert row(trace, name, "auto", AcceptanceModel((rate,)))["completion_mean_seconds"] < plain


STAGES = "pp4tp2"


def staged(trace, choice=None, acceptance=None):
    drafts = NO_DRAFTS
    if choice is not None:
        fixed = {"fixed_drafts": True, "draft_max_seqs": 0}
        options = fixed if choice == "fixed" else {"draft_choice": choice}
        drafts = DraftOptions(speculation="suffix", **options)
    wanted = deploy(H200, STAGES, drafts=drafts, **SMALL)
    return summary(replay(trace, H200, wanted, acceptance=acceptance))


def test_one_request_passes_all_stages_once_for_several_tokens():
    """Each step accepts two guesses, in a third of the steps. The host waits for each."""
    trace = [TraceRequest(0.0, 64, 999)]
    plain = staged(trace)["seconds"]
    drafted = staged(trace, "fixed", AcceptanceModel((1.0,), mean_tokens=2.0))["seconds"]
    costs = cost_model(H200, deploy(H200, STAGES, **SMALL))
    host = costs.host_seconds(Work.decode(1, 500)) + H200.engine.draft_seconds
    assert drafted == pytest.approx((plain + 999 * host) / 3, rel=0.03)


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_drafts_gain_in_stages_that_are_not_full(rate):
    trace, acceptance = poisson(0.5, 10.0, 600, 60), AcceptanceModel((rate,))
    plain = staged(trace)["completion_mean_seconds"]
    assert staged(trace, "auto", acceptance)["completion_mean_seconds"] < 0.9 * plain


@pytest.mark.parametrize("rate", [0.1, *thorough(0.6)])
def test_the_choice_by_cost_does_not_lose_in_full_stages(rate):
    traces, acceptance = [poisson(30.0, 4.0, 600, 60, n) for n in (0, 1)], AcceptanceModel((rate,))

    def mean(*drafts):
        rows = (staged(trace, *drafts) for trace in traces)
        return sum(each["completion_mean_seconds"] for each in rows) / len(traces)

    chosen = mean("auto", acceptance)
    assert chosen <= 1.04 * mean()
    assert chosen <= 1.04 * mean("fixed", acceptance)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6])
def test_the_choice_by_cost_does_not_lose_at_high_load(rate):
    """Fixed lengths do; 4% are the steps that find out. A few steps more or less move one draw."""
    traces, acceptance = [poisson(30.0, 6.0, 600, 60, n) for n in (0, 1)], AcceptanceModel((rate,))

    def mean(*drafts):
        rows = (row(trace, "cost", *drafts) for trace in traces)
        return sum(each["completion_mean_seconds"] for each in rows) / len(traces)

    chosen = mean("auto", acceptance)
    assert chosen <= 1.04 * mean()
    assert chosen <= 1.04 * mean("fixed", acceptance)


def test_where_predictions_are_exact_nothing_is_learned_of_steps(monkeypatch):
    """The simulator's are: what it decides does not depend on what steps took."""
    trace, acceptance = poisson(12.0, 4.0, 600, 60), AcceptanceModel((0.2,))
    names, steps = ("tp", "shift", "cost"), []
    found = [
        replay(trace, NO_SWITCH, deployment(n, "auto", NO_SWITCH), acceptance=acceptance)
        for n in names
    ]
    monkeypatch.setattr(StepTimes, "learn", lambda self, *step: steps.append(step))
    for name, one in zip(names, found, strict=True):
        assert any(record.num_proposed_tokens for record in one.requests)
        other = replay(trace, NO_SWITCH, deployment(name, "auto", NO_SWITCH), acceptance=acceptance)
        assert (one.requests, one.steps) == (other.requests, other.steps)
    assert {kind.is_hidden for kind, _, _ in steps} == {True, False}
    measured, predicted = zip(*(step[1:] for step in steps), strict=True)
    assert measured == pytest.approx(predicted, rel=1e-9)
