"""What is told of sizes: who decided, how long decodes did not wait, and a sentence."""

import pytest

from shiftjax.core.request import Request, SamplingParams
from shiftjax.sim.devices import Clock
from shiftjax.sim.experiments import target_from
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import serve
from shiftjax.sim.sim_backend import make_engine
from shiftjax.sizing.drain import Queue, candidates
from shiftjax.sizing.size_stats import SizeStats, metrics, page_part, plain_choice

SIZES = [128, 1024, 8192]
MILLISECONDS = {128: 20, 1024: 40, 8192: 150}


def seconds(i, num_prompt_tokens):
    return MILLISECONDS[SIZES[i]] / 1e3


def told(queue: Queue, pick=None, seconds=seconds) -> SizeStats:
    """The counters of one choice: the best, or another of the candidates."""
    found, stats = candidates(SIZES, 8192, queue, seconds), SizeStats()
    kept = [each for each in found if each.keeps]
    best = found[pick] if pick is not None else min(kept, key=lambda each: each.sized.cost)
    stats.count(SIZES, queue, found, best, seconds)
    return stats


def test_the_sentence_says_what_the_largest_step_would_have_cost():
    """Two prompts of 900 tokens beside 100 decodes: two steps of 1,024, or one of 8,192."""
    stats = told(Queue(100, [900, 1800]))
    ((size, reason),) = stats.steps
    assert (size, reason) == (1024, "least")
    assert stats.last is not None and stats.last.words == (
        "1,024 tokens: 40 ms. 8,192 would take 150 ms: 100 decodes 110 ms later; "
        "first tokens come 60% sooner this way (limit 10% later). "
        "128 would take 20 ms: first tokens 16.3 times as late"
    )
    assert stats.avoided_seconds == pytest.approx(100 * 0.11)


def test_every_reason_is_told_apart():
    assert list(told(Queue(0, [100])).steps) == [(128, "alone")]
    # Ten steps of 25 ms delay decodes less than one of 150 and a rest, but the prompt by more.
    long, quick = Queue(100, [9000]), (0.020, 0.025, 0.150)
    guarded = told(long, seconds=lambda i, n: quick[i])
    assert list(guarded.steps) == [(8192, "guard")]
    assert guarded.last.words == (
        "8,192 tokens: 150 ms, the largest that there is work for. "
        "128 would take 20 ms: first tokens 36.8 times as late"
    )
    assert list(told(long, 1, lambda i, n: quick[i]).steps) == [(1024, "targets")]


def test_sizes_cost_those_who_wait_what_was_compared():
    """The largest, the chosen and the smallest, with the sums that the choice was made by."""
    queue = Queue(100, [900, 1800])
    by_size = {SIZES[each.place]: each for each in candidates(SIZES, 8192, queue, seconds)}
    told_of = plain_choice(told(queue).last)
    assert (told_of["reason"], told_of["why"]) == ("least", "it costs least")
    assert (told_of["num_decodes"], told_of["num_prompts"]) == (100, 2)
    assert [row["tokens"] for row in told_of["sizes"]] == [8192, 1024, 128]
    for row in told_of["sizes"]:
        sized = by_size[row["tokens"]].sized
        assert row["step_seconds"] == MILLISECONDS[row["tokens"]] / 1e3
        assert (row["first_token_seconds"], row["late_seconds"]) == (sized.first, sized.late)
        assert row["is_chosen"] == (row["tokens"] == 1024)
    alone = plain_choice(told(Queue(0, [100])).last)
    assert [(row["tokens"], row["is_chosen"]) for row in alone["sizes"]] == [(128, True)]


def test_groups_are_told_together():
    one, other = told(Queue(100, [900, 1800])), told(Queue(0, [100]))
    both = one + other + one
    assert page_part(both) == {
        "steps": {"128": 1, "1024": 2},
        "reasons": {"least": 2, "alone": 1},
        "last": one.last.words,
    }
    steps, delay = metrics(both)
    assert steps.values == {("128", "alone"): 1, ("1024", "least"): 2}
    assert delay.values == {(): pytest.approx(22.0)}
    assert not list(metrics(None))


def test_an_engine_counts_its_steps_with_prompts():
    target = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
    clock = Clock()
    engine, (runner, *_) = make_engine(target, [deploy(target, "cost")], clock)
    some = SamplingParams(max_tokens=20, ignore_eos=True)
    serve(engine, clock, (Request(str(n), [n] * 700, some, 0.05 * n) for n in range(9)))
    stats = engine.stats().find(SizeStats)
    with_prompts = [step for step in runner.steps if step.num_tokens > step.num_decodes]
    assert stats is not None and stats.steps.total() == len(with_prompts) > 3
