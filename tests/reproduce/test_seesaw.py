"""Seesaw's evaluation: what is run, and how near it is."""

import pytest

from shiftjax.reproduce import seesaw
from shiftjax.reproduce.figures import Curve, Figure, Options, count
from shiftjax.reproduce.lengths import articles
from shiftjax.reproduce.run import results_of
from shiftjax.reproduce.seesaw import (
    LABELS,
    best,
    budgets_of,
    compared,
    rate,
    run,
    small_a100,
    target,
)
from shiftjax.sim.replay_metrics import makespan

QUICK = Options(quick=True)


def results(*parts, options=QUICK):
    return list(results_of("seesaw", options, parts))


def figures_of(*parts, options=QUICK):
    return [each for each in results(*parts, options=options) if isinstance(each, Figure)]


def test_a_replica_is_run_with_its_share():
    """Two engines on four devices each are as quick as one on four with half of the requests."""
    requests, of = articles(12), target("codellama-34b", "a10x8")
    both = run(of, "dp2tp4", requests, 512)
    half = target("codellama-34b", "a10x8", 4)
    alone = run(half, "tp4", requests[::2], 512)
    assert len(both.requests) == 6
    assert makespan(both) == makespan(alone)
    assert rate(of, "dp2tp4", requests, 512) == pytest.approx(
        2 * rate(half, "tp4", requests[::2], 512)
    )


def test_phases_park_within_the_hosts_memory(monkeypatch):
    """80 GiB a device hold all of these; a twentieth of a GiB makes more switches."""
    requests, of = articles(24), target("llama-3-15b", "a10x8", 4)
    assert len(run(of, "pp4:tp4", requests, 2048).phases.switches) == 1
    monkeypatch.setattr(seesaw, "HOST_BYTES", 1 << 29)
    assert len(run(of, "pp4:tp4", requests, 2048).phases.switches) > 1


def test_what_does_not_fit_is_not_the_best():
    of, requests = target("llama-2-70b", "a10x8"), articles(4)
    assert rate(of, "dp2tp4", requests, 512) == 0.0
    found = best(of, ("dp2tp4", "tp8"), requests, quick=False)
    assert found.name == "tp8"
    assert found.rate > 0


def test_sizes_of_steps_are_tried_where_it_matters():
    assert budgets_of("tp8") == (512, 2048)
    assert budgets_of("pp2tp4") == (512,)
    assert budgets_of("pp8:tp8") == (2048,)


def test_the_small_a100_has_the_links_of_its_kind():
    pcie, nvlink = small_a100("a100x8-pcie").machine, small_a100("a100x8").machine
    assert pcie.memory_bytes == nvlink.memory_bytes == 42_949_672_960
    assert pcie.memory_bytes_per_second == 1555e9
    slow, quick = (max(way.bytes_per_second for way in m.all_reduce) for m in (pcie, nvlink))
    assert slow < quick / 5


@pytest.mark.costs(20)
def test_phases_gain_what_was_published_on_cards_with_pcie():
    found = figures_of("pcie")
    assert count(found).compared == 6
    assert count(found).fair >= 5
    gains = [each for each in found if "gain of phases" in each.what]
    assert len(gains) == 12
    assert all(each.ours > 1.0 for each in gains)
    assert all("published as best" in each.note for each in gains)


def test_stages_suit_prompts_and_tp_suits_decodes():
    """Figures 12 and 13, of which nothing but orders is published."""
    found = {each.what: each.ours for each in figures_of("breakdown", "outputs")}
    assert found["34B, 4 x A10, arxiv: phases over pp2tp2"] > 1.2
    first = "70B, 8 x A10, 3,000 in, 1 out: {} over phases"
    assert found[first.format("pp8")] > 1.0 > found[first.format("pp2tp4")]
    assert found["70B, 8 x A10, 3,000 in, more out: the best static over phases, most"] < 1.0


def test_quick_links_make_tp_the_best_and_slow_ones_stages():
    (curve,) = (each for each in results("links") if isinstance(each, Curve))
    slow, quick = ({name: points[n][1] for name, points in curve.lines.items()} for n in (0, -1))
    assert slow["pp4tp2"] > slow["tp8"]
    assert quick["tp8"] > quick["pp4tp2"]
    assert quick["tp8"] > 2 * slow["tp8"]


@pytest.mark.thorough
def test_links_of_the_a100_matter_as_much_as_was_published():
    found = count(figures_of("a100"))
    assert found.compared == 8
    assert found.fair >= 7


@pytest.mark.thorough
def test_all_configurations_with_all_requests_gain_what_some_gain():
    """One bar of figure 10 in both sizes; the whole evaluation is `shiftjax reproduce seesaw`."""
    of = target("llama-3-15b", "a10x8", 4)
    sizes = [compared(of, "arxiv", Options(quick=quick)) for quick in (False, True)]
    assert {phases.name for _, phases in sizes} == {LABELS["a10x8", "15b", "arxiv"][1]}
    whole, some = (phases.rate / static.rate for static, phases in sizes)
    assert whole > 1.0
    assert whole == pytest.approx(some, rel=0.1)
