"""The least devices for a load: what is found keeps the limits, and less does not."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shiftjax.sim.advice import Advice, least_devices
from shiftjax.sim.advice_words import in_words
from shiftjax.sim.estimate import Workload
from shiftjax.sim.experiments import target_from
from shiftjax.sim.load import SEEDS, Limits, even_load
from shiftjax.sim.replay import replay
from shiftjax.sim.replay_metrics import summary
from shiftjax.sim.servers import Server, all_servers
from shiftjax.sim.trials import Measured, Trial, Trials

SMALL = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
LIMITS = Limits(1.0, 0.06)
EACH = Workload(500, 30)
MARGIN = 0.05


def target(machine: str, model: str = "llama-8b", num_devices: int = 4):
    whole = target_from({"model": model, "machine": machine, "dtype": "bfloat16"})
    return replace(whole, machine=replace(whole.machine, num_devices=num_devices))


def advised(
    targets, rate: float, limits: Limits = LIMITS, prices=None, each: Workload = EACH, **more
) -> Advice:
    settings: dict[str, Any] = SMALL | more
    most = settings.pop("most_replays", 100)
    load = even_load(each, limits)
    trials = Trials(load, limits, MARGIN, most)
    field = all_servers(targets, load, limits, settings.pop("is_cache_open", False), settings)
    return least_devices(field, trials, rate, prices or {}, settings)


@pytest.fixture(scope="module")
def found() -> Advice:
    return advised([target("l4x8"), target("a10x8")], 12.0)


def p90(trial: Trial, num_servers: int, rate: float, seed: int) -> tuple[float, float]:
    """Both latencies of one of so many servers, by a replay of its own."""
    requests = even_load(EACH, LIMITS).of_one(rate, num_servers, seed)
    row = summary(replay(requests, trial.target, trial.deployment))
    return row["ttft_p90_seconds"], row["tpot_p90_seconds"]


def test_the_best_keeps_the_limits_with_all_seeds_and_costs_least(found):
    best = found.best
    assert best is not None and best.meets and len(best.measured) == SEEDS
    of_seeds = [p90(best, best.num_servers, 12.0, seed) for seed in range(SEEDS)]
    assert [(each.ttft, each.tpot) for each in best.measured] == of_seeds
    assert all(ttft <= 1.0 and tpot <= 0.06 for ttft, tpot in of_seeds)
    means = [sum(values) / SEEDS for values in zip(*of_seeds, strict=True)]
    assert means[0] <= 0.95 * 1.0 and means[1] <= 0.95 * 0.06
    kept = [trial for trial in found.trials.all if trial.meets]
    assert best.num_devices == min(trial.num_devices for trial in kept)
    if best.num_servers > 1:
        fewer = [p90(best, best.num_servers - 1, 12.0, seed) for seed in range(SEEDS)]
        assert any(ttft > 0.95 or tpot > 0.95 * 0.06 for ttft, tpot in fewer)
    assert {each.target.machine.name for each in found.field.servers} == {"l4x8", "a10x8"}


def test_the_cheapest_come_first(found):
    costs = [trial.num_devices for trial in found.trials.all]
    assert costs == sorted(costs) and found.is_complete
    assert found.left_out + len({id(t.server) for t in found.trials.all}) >= len(
        found.field.servers
    )


@pytest.mark.thorough
def test_prices_choose_the_machine():
    machines = [target("l4x8"), target("a10x8")]
    for cheap, dear in (("l4x8", "a10x8"), ("a10x8", "l4x8")):
        best = advised(machines, 12.0, prices={cheap: 0.1, dear: 100.0}).best
        assert best is not None and best.target.machine.name == cheap


class Scripted(Trials):
    """Trials that keep the limits from so many devices on, by the format of the KV cache."""

    least: Mapping[str, int]

    def first(self, server: Server, num_servers: int, rate: float, changed: str = "") -> Trial:
        keeps = num_servers * server.num_devices >= self.least[server.target.formats.kv]
        measured = Measured(0.5 if keeps else 2.0, 0.03, 1.0, 1.0, 1, 0)
        self.num_replays += 1
        self.all.append(Trial(server, num_servers, rate / num_servers, (measured,), keeps, changed))
        return self.all[-1]

    def confirmed(self, trial: Trial, rate: float) -> Trial:
        return trial


@pytest.mark.parametrize(
    ("least", "kv"),
    [
        ({"bfloat16": 4, "fp8": 4}, "bfloat16"),
        ({"bfloat16": 8, "fp8": 4}, "fp8"),
        ({"bfloat16": 4, "fp8": 8}, "bfloat16"),
    ],
)
def test_a_cache_in_codes_is_for_what_it_saves(least, kv):
    """It is taken where it saves devices; where it saves none, KV stays as it is computed."""
    load = even_load(EACH, LIMITS)
    trials = Scripted(load, LIMITS, MARGIN, 100)
    trials.least = least
    field = all_servers([target("l4x8")], load, LIMITS, True, SMALL)
    best = least_devices(field, trials, 6.0, {}, SMALL).best
    assert best is not None and best.num_devices == min(least.values())
    assert best.deployment.formats.kv == kv


def scripted(least: int, rate: float) -> Advice:
    load = even_load(EACH, LIMITS)
    trials = Scripted(load, LIMITS, MARGIN, 100)
    trials.least = {"bfloat16": least}
    field = all_servers([target("a10x8", num_devices=2)], load, LIMITS, False, SMALL)
    return least_devices(field, trials, rate, {}, SMALL)


@pytest.mark.parametrize("least", [60, 62, 64, 66, 68, 70])
def test_what_strides_left_out_is_tried_in_the_end(least):
    """Far from the limits the next trial has many more servers."""
    advice = scripted(least, 60.0)
    tried = {trial.num_devices for trial in advice.trials.all}
    assert advice.best is not None and advice.best.num_devices == least
    assert len(tried) < 20


def test_of_what_is_idle_no_more_is_tried():
    advice = scripted(10**9, 1.0)
    assert advice.best is None and advice.is_complete
    assert max(trial.num_servers for trial in advice.trials.all) <= 32  # 2.9 s a request


@pytest.mark.thorough
def test_more_load_and_tighter_limits_never_need_less():
    def devices(rate: float, limits: Limits) -> float:
        best = advised([target("a10x8")], rate, limits).best
        return best.num_devices if best else math.inf

    usual = devices(6.0, LIMITS)
    assert usual <= devices(24.0, LIMITS)
    assert usual <= devices(6.0, Limits(0.3, 0.06))
    assert usual <= devices(6.0, Limits(1.0, 0.025))


@pytest.mark.thorough
def test_a_quick_time_to_the_first_token_needs_wider_groups():
    def width(ttft: float) -> int:
        limits, each = Limits(ttft, 0.05), Workload(4000, 30)
        best = advised([target("h100x8")], 2.0, limits, each=each, max_num_seqs=256).best
        assert best is not None
        return best.deployment.sp * best.deployment.tp

    assert width(5.0) == 1 < width(0.13)


def test_what_cannot_be_is_said_with_a_reason():
    nothing = advised([target("l4x8")], 1.0, Limits(1e-4, 1e-4))
    assert nothing.best is None and not nothing.trials.all
    assert "where a request is alone" in in_words(nothing, {})
    too_large = advised([target("l4x8", "llama-70b")], 1.0, Limits(9.0, 9.0))
    assert "has no room for the weights and one request" in in_words(too_large, {})


def test_a_request_that_fits_nowhere_is_a_reason():
    """The mean has room, the longest of all has none: no row of zeros."""
    limits = Limits(60.0, 9.0)
    load, settings = even_load(Workload(9000, 30), limits, 2.0), SMALL | {"memory_fraction": 0.5}
    one = target("l4x8", num_devices=2)
    trials = Trials(load, limits, MARGIN, 2)
    field = all_servers([one], load, limits, False, settings)
    advice = least_devices(field, trials, 0.1, {}, settings)
    assert advice.best is None
    assert "of its requests are longer than its KV cache" in in_words(advice, {})


def test_a_search_that_ends_early_says_so(found):
    cut = advised([target("l4x8")], 12.0, most_replays=1)
    assert not cut.is_complete
    assert "ended before all was tried" in in_words(cut, {})
    assert "ended before" not in in_words(found, {})


def test_the_answer_the_reason_and_the_command_come_first(found):
    best = found.best
    lines = in_words(found, {}, "my/checkpoint").splitlines()
    assert lines[0].startswith(f"Take {best.num_devices} devices of {best.target.machine.name}: ")
    assert "12 requests/s, of which 90% get 1 s to the first token and 60 ms a token" in lines[1]
    assert lines[2].startswith("Why: of ")
    assert lines[3].startswith("Start") and ": shiftjax serve my/checkpoint --sp " in lines[3]
    assert f"means of {SEEDS} replays" in lines[4]
    assert "published figures were further off" in lines[5]
    assert not any("$" in line for line in lines)


def test_dollars_are_of_all_devices(found):
    best, prices = found.best, {"l4x8": 0.8, "a10x8": 1.2}
    row = best.row(prices)
    assert row["dollars_per_hour"] == pytest.approx(best.num_devices * prices[row["machine"]])
    tokens = best.tokens_per_second * best.num_servers * 3600
    assert row["dollars_per_million"] == pytest.approx(row["dollars_per_hour"] / tokens * 1e6)
    assert f"${row['dollars_per_hour']:,.2f} an hour" in in_words(found, prices)


@pytest.mark.thorough
def test_the_example_of_the_documents_needs_24_devices_or_fewer():
    """Before sizes of steps were chosen it took 40."""
    whole = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
    limits, each = Limits(0.5, 0.03), Workload(4096, 250)
    load = even_load(each, limits)
    trials = Trials(load, limits, MARGIN, 100)
    field = all_servers([whole], load, limits, True, {})
    best = least_devices(field, trials, 20.0, {}, {}).best
    assert best is not None and best.num_devices <= 24 and len(best.measured) == SEEDS
    assert all(m.ttft <= 0.5 and m.tpot <= 0.03 for m in best.measured)
    assert best.inside >= 0.9
