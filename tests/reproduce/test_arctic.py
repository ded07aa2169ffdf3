"""Arctic Inference's evaluation: what is run, and what each part brings."""

import pytest

from shiftjax.reproduce import arctic
from shiftjax.reproduce.figures import Options, published
from shiftjax.reproduce.measures import alone, by_name, target
from shiftjax.reproduce.run import results_of

QUICK = Options(quick=True)


def figures_of(*parts):
    return list(results_of("arctic", QUICK, parts))


def test_every_published_figure_has_a_row():
    rows = figures_of()
    names = {(each.number, each.what) for each in rows}
    known = published("arctic").figures.values()
    assert {(each["figure"], each["what"]) for each in known} <= names
    not_run = [each.what for each in rows if each.ours is None]
    assert all("over vLLM" in each for each in not_run)
    assert len(not_run) == 2


def test_the_mixture_has_as_many_tokens_of_each_kind():
    """9,000 tokens: 3,000 in steps of 1.8, 1.57 and 5.63."""
    model = arctic.mixed()
    steps = [3000 / tokens for tokens, _ in arctic.ACCEPTANCE.values()]
    drafted = [
        (3000 - num) / share
        for num, (_, share) in zip(steps, arctic.ACCEPTANCE.values(), strict=True)
    ]
    assert model.mean_tokens == pytest.approx(sum(drafted) / sum(steps))
    of = target("llama-70b")
    (one,) = by_name(of, {"tp": "tp"}, drafts=arctic.DRAFTS).values()
    (plain,) = by_name(of, {"tp": "tp"}).values()
    quicker = alone(of, plain, 100, 3000).tpot / alone(of, one, 100, 3000, model).tpot
    assert quicker == pytest.approx(9000 / sum(steps), rel=0.1)


def test_swiftkv_computes_prompts_by_half_of_the_layers():
    plain = target("llama-70b")
    times = []
    for of in (plain, arctic.with_swiftkv(plain)):
        (one,) = by_name(of, {"tp": "tp"}).values()
        times.append(alone(of, one, 4000, 20))
    assert times[1].ttft / times[0].ttft == pytest.approx(0.55, abs=0.08)
    assert times[1].tpot == pytest.approx(times[0].tpot, rel=0.06)


def test_what_a_published_rate_needs_is_told_from_what_ours_has():
    rows = {each.what: each for each in figures_of("drafts")}
    assert rows["the same, suffix decoding, ShareGPT"].error == pytest.approx(0.2, abs=0.1)
    needed = rows["tokens a step that the published rate of humaneval needs"]
    assert needed.published is None
    assert 2 < needed.ours < 4
    had, _ = arctic.ACCEPTANCE["humaneval"]
    ours, theirs = (
        getattr(rows["the same, LSTM and suffix, HumanEval"], x) for x in ("ours", "published")
    )
    assert needed.ours / had == pytest.approx(theirs / ours)


def test_each_part_of_the_compound_makes_it_better():
    rows = {each.what: each.ours for each in figures_of("production")}
    completion = [
        rows[f"{name}: p95 of completion"]
        for name in ("DP", "TP", "Shift", "Shift, SwiftKV", "Arctic")
    ]
    assert completion[0] > 2 * completion[1] > 2 * completion[4]
    # SwiftKV spares devices, and not the front end.
    assert rows["Shift, SwiftKV: throughput"] > 1.2 * rows["Shift: throughput"]
    assert rows["Shift: throughput"] > 1.3 * rows["TP: throughput"]
