"""Drafts through pipeline stages: the tokens are those of one stage without drafts."""

import itertools
import tempfile
from pathlib import Path

import pytest
from engines import RandomPolicy, checkpoint, crowd, make, run, tokens
from oracle import numpy_llama, numpy_speculator
from spent import exhaustive, thorough
from test_drafted_steps import QUALITIES, Known, let_draft
from test_guesses import LSTM, MLP, knowing_pairs

from shiftjax.arch.weights import SPECULATOR, weights_of
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import weight_bytes
from shiftjax.device.programs import CompileCounter
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.speculation import DraftStats

OUTPUT_TOKENS, BUCKET, CROWDED = 12, 32, 28
SWAPS = {"preemption": "swap", "host_memory": "8MB"}
# A speculator, degrees, layers, what else.
CASES = {
    "pp2sp2": (MLP, (2, 2, 1), 2, {}),
    "pp2sp2tp2": (LSTM, (2, 2, 2), 3, SWAPS),
    "pp4tp2": (MLP, (4, 1, 2), 4, {}),
}


@pytest.fixture(scope="module", params=["pp2sp2", *thorough("pp2sp2tp2"), *exhaustive("pp4tp2")])
def staged(request):
    """An engine in stages with a speculator, and what its target says to a crowd."""
    speculator, (pp, sp, tp), num_layers, options = CASES[request.param]
    directory, *target = checkpoint(num_hidden_layers=num_layers)
    prompts = crowd(1)
    expected = [numpy_llama.greedy(*target, each, OUTPUT_TOKENS) for each in prompts]
    tensors = numpy_speculator.random_tensors(speculator, seed=5)
    if speculator is MLP:
        tensors = knowing_pairs(speculator, expected)
    where = numpy_speculator.save(Path(tempfile.mkdtemp()), speculator, tensors)
    options = {"speculation": "hybrid", "draft_model": str(where), **options}
    options |= {"num_blocks": CROWDED, "max_model_len": 96, "controls": {"max_draft_rows": 24}}
    made = make(directory, sp, tp, pp=pp, whole=True, token_buckets=[BUCKET], **options)
    for runner, mode in itertools.product(made.runners, made.deployment.layout.modes):
        for program in runner.programs:
            runner.compiled(program, mode)  # a random policy chooses any
    return made, directory, prompts, expected


def greedy(**others) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, **others)


def drafter(speculation: str) -> Drafting:
    return Drafting(DraftOptions(speculation, "-", fixed_drafts=True, draft_max_seqs=0))


@pytest.mark.costs(25)
@pytest.mark.parametrize("speculation", ["model", "hybrid", *thorough("ngram", "suffix")])
def test_greedy_tokens_equal_the_oracle(staged, speculation):
    """With chunks, prefix hits, preemption, abort, stop and random modes; none is compiled."""
    made, _, prompts, expected = staged
    made.engine.policy = RandomPolicy(3)
    stats = let_draft(made, drafter(speculation), num_guesses=3).stats
    sampling = [greedy()] * len(prompts)
    sampling[5] = greedy(stop_token_ids=(expected[5][3],))
    counter, before = CompileCounter(), made.engine.stats()
    counter.start()
    for abort_at in ({6: 2}, {}):  # at the second time the corpus knows the answers
        events = run(made.engine, prompts, sampling, abort_at=abort_at)
        for i, want in enumerate(expected):
            got, reason = tokens(events[i, 0]), events[i, 0][-1].finish_reason
            assert reason == {2: "abort" if abort_at else "length", 5: "stop"}.get(i, "length")
            assert got == want[: len(got)] and (reason != "length" or len(got) == len(want))
    counter.stop()
    after = made.engine.stats()
    assert counter.count == 0
    kind = made.deployment.preemption
    assert after.num_preemptions[kind] > before.num_preemptions[kind]
    assert after.num_prefix_hit_tokens > before.num_prefix_hit_tokens
    if speculation == "model":
        assert sum(stats.by_drafter["model"].values()) > 20
        assert stats.num_accepted > 20 or made.deployment.tp > 1  # that LSTM knows nothing
    elif speculation != "ngram":
        assert stats.tokens["suffix", "accepted"] > 20


@pytest.mark.parametrize("quality", ["half", *thorough("right", "wrong")])
def test_draws_are_those_of_one_stage_without_drafts(staged, quality):
    made, directory, _, _ = staged
    alone = make(directory, 1, 1, whole=True, token_buckets=[BUCKET])
    prompts = crowd(2, 7)
    sampling = [
        SamplingParams(
            temperature=1.1,
            top_p=0.9,
            frequency_penalty=1.5 * (i % 2),
            seed=i,
            n=1 + i % 2,
            stop_token_ids=(7, 12, 13),
            min_tokens=4,
            max_tokens=OUTPUT_TOKENS,
        )
        for i in range(len(prompts))
    ]
    plain = run(alone.engine, prompts, sampling)
    known = {(tuple(prompts[i]), index): tokens(each) for (i, index), each in plain.items()}
    stats = let_draft(made, Known(known, QUALITIES[quality])).stats
    drafted = run(made.engine, prompts, sampling)
    assert {k: tokens(e) for k, e in drafted.items()} == {k: tokens(e) for k, e in plain.items()}
    assert (stats.tokens["known", "accepted"] > 0) is (quality != "wrong")
    assert (stats.tokens["known", "rejected"] > 0) is (quality != "right")


def test_other_micro_batches_fly_while_one_is_verified(staged, monkeypatch):
    made, _, prompts, expected = staged
    (lane,), pp = made.engine.lanes, made.deployment.pp
    known = {(tuple(p), 0): ids for p, ids in zip(prompts, expected, strict=True)}
    let_draft(made, Known(known, QUALITIES["half"]))
    flying, fetch = [], lane.runner.fetch

    def fetched(handle):
        flights = [lane.awaited, *lane.in_flight]
        flying.append([each.plan.micro_batch for each in flights if each.has_proposals])
        return fetch(handle)

    monkeypatch.setattr(lane.runner, "fetch", fetched)
    events = run(made.engine, prompts, [greedy()] * len(prompts))
    assert [tokens(events[i, 0]) for i in range(len(prompts))] == expected
    assert all(len(set(each)) == len(each) for each in flying)
    assert max(map(len, flying)) >= min(pp, 3)  # the pool has room for three


def test_the_last_stage_has_the_speculator_and_all_stages_the_blocks_that_it_leaves(staged):
    made, *_ = staged
    formats, counts = made.deployment.formats, []
    for stage, runner in zip(made.deployment.stages, made.runners, strict=True):
        names = [weight.name for weight in weights_of(stage.layout.model)]
        counts.append(sum(name.startswith(SPECULATOR) for name in names))
        memory = runner.memory
        first = memory.mesh.devices.flat[0]
        held = sum(
            shard.data.nbytes
            for array in memory.params(runner.step.layout.base)
            for shard in array.addressable_shards
            if shard.device == first
        )
        assert held == weight_bytes(stage.layout, formats)
    assert counts[-1] > 0 and not any(counts[:-1])
    assert made.engine.stats().find(DraftStats) is not None
