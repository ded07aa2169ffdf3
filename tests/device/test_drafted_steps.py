"""Drafts right, wrong, half right, through real steps: the tokens are those of plain decoding."""

import itertools

import numpy as np
import pytest
from engines import RandomPolicy, checkpoint, make, run, tokens
from oracle import numpy_llama
from spent import exhaustive
from test_mode_invisibility import CROWDED, OUTPUT_TOKENS, greedy, prompts_with_shared_prefixes

from shiftjax.core.lookahead import Lookahead
from shiftjax.core.request import SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import Speculation

VOCAB_SIZE = 199
QUALITIES = {"right": lambda n: False, "wrong": lambda n: True, "half": lambda n: n % 3 == 2}


class Known(Drafting):
    """Drafts what is known to come, but for tokens whose number `is_wrong`."""

    def __init__(self, known, is_wrong):
        super().__init__(DraftOptions(speculation="suffix", fixed_drafts=True))
        self.known, self.is_wrong, self.count = known, is_wrong, 0

    def draft(self, name, most):
        done = name.num_output_tokens
        rest = self.known[tuple(name.request.prompt_token_ids), name.index][done : done + most]
        guesses = []
        for token in rest:
            self.count += 1
            guesses.append((token + self.is_wrong(self.count)) % VOCAB_SIZE)
        return self.rated(name, guesses, [0.5] * len(guesses), "known") if guesses else None


@pytest.fixture(
    scope="module",
    params=[(3, 2), *exhaustive(((2, 2),))],
    ids=lambda mesh: f"sp{mesh[0]}tp{mesh[1]}",
)
def built(request):
    directory, config, tensors = checkpoint()
    options = {"num_blocks": CROWDED, "speculation": "suffix"}
    options["controls"] = {"max_draft_rows": 24}
    options["token_buckets"] = [8, 32] if request.param == (2, 2) else [32]
    made = make(directory, *request.param, whole=True, **options)
    (runner,) = made.runners
    for program, mode in itertools.product(runner.programs, runner.step.weights.modes):
        runner.compiled(program, mode)  # a random policy chooses any
    return made, config, tensors


def let_draft(built, drafting, num_guesses=0):
    """Put a drafter in the place of the engine's own; None: nobody drafts."""
    (lane,) = built.engine.lanes
    budgets, speculation = built.deployment.budgets, None
    if drafting is not None:
        prices = Prices(built.deployment.step_sizes, built.engine.policy, lane.modes)
        speculation = Speculation(
            drafting,
            prices,
            max_rows=budgets.max_rows,
            num_guesses=num_guesses,
            num_micro_batches=budgets.num_micro_batches,
        )
    lane.scheduler.lookahead = speculation or Lookahead()
    return speculation


@pytest.mark.costs(15)
@pytest.mark.parametrize("quality", QUALITIES)
def test_greedy_tokens_equal_the_oracle_whatever_is_drafted(built, quality):
    """With preemption, prefix hits, chunks and random modes; nothing is compiled for drafts."""
    made, config, tensors = built
    made.engine.policy = RandomPolicy(3)
    prompts = prompts_with_shared_prefixes(1)
    expected = [numpy_llama.greedy(config, tensors, p, OUTPUT_TOKENS) for p in prompts]
    known = {(tuple(p), 0): ids for p, ids in zip(prompts, expected, strict=True)}
    speculation = let_draft(made, Known(known, QUALITIES[quality]))
    before, counter = made.engine.stats(), CompileCounter()
    counter.start()
    events = run(made.engine, prompts, [greedy()] * len(prompts))
    counter.stop()
    for number, ids in enumerate(expected):
        assert tokens(events[number, 0]) == ids
    after, drafted = made.engine.stats(), speculation.stats.tokens
    preempted = after.num_preemptions["recompute"] - before.num_preemptions["recompute"]
    assert preempted > 0 or quality == "right"  # these are over before there is a crowd
    assert after.num_prefix_hit_tokens > before.num_prefix_hit_tokens
    assert (drafted["known", "accepted"] > 0) is (quality != "wrong")
    assert (drafted["known", "rejected"] > 0) is (quality != "right")
    assert counter.count == 0


def test_engines_that_draft_read_the_context_of_a_draft_once(built):
    """The others keep large tiles for chunks of prompts; see `LoopSizes.row_tile`."""
    (runner,) = built[0].runners
    lens, starts = np.array([20, 0], np.int32), np.array([0, 6, 6], np.int32)
    step = np.zeros((2, 8), np.int32), lens, starts, 1
    (work,) = runner.step.attention.divide(*step, num_tokens=8, num_rows=8)
    assert (work.tiles.num_tiles, work.rows.num_waves) == (1, 0)


@pytest.mark.costs(10)
def test_drafted_rows_pass_late_layers_too():
    """SwiftKV: every row of a draft attends alone, in early layers and in late ones."""
    layers = {"num_hidden_layers": 2, "num_key_value_layers": 1}
    directory, config, tensors = checkpoint(model_type="llama_swiftkv", **layers)
    made = make(directory, 2, 1, speculation="suffix", controls={"max_draft_rows": 24})
    made.engine.policy = RandomPolicy(5)
    prompts = prompts_with_shared_prefixes(2, 4)
    expected = [numpy_llama.greedy(config, tensors, p, OUTPUT_TOKENS) for p in prompts]
    known = {(tuple(p), 0): ids for p, ids in zip(prompts, expected, strict=True)}
    drafted = let_draft(made, Known(known, QUALITIES["half"])).stats.tokens
    events = run(made.engine, prompts, [greedy()] * len(prompts))
    for number, ids in enumerate(expected):
        assert tokens(events[number, 0]) == ids
    assert min(drafted["known", "accepted"], drafted["known", "rejected"]) > 0


@pytest.mark.parametrize("quality", QUALITIES)
def test_sampled_tokens_are_those_without_drafts(built, quality):
    """Filters, penalties, bias, min_tokens, stops, log-probabilities, several continuations."""
    made, _, _ = built
    made.engine.policy = RandomPolicy(4)
    prompts = prompts_with_shared_prefixes(5, 6)
    params = [
        SamplingParams(
            temperature=1.1,
            top_p=0.9,
            top_k=50 if i % 2 else 0,
            frequency_penalty=0.3 * (i % 3),
            presence_penalty=0.2 * (i % 2),
            repetition_penalty=1.2,
            logit_bias={20: 5.0, 21: 4.0, 22: 4.0, 23: -5.0} if i % 3 else None,
            stop_token_ids=(7, 12, 13, 14),
            seed=i,
            n=1 + i % 2,
            max_tokens=OUTPUT_TOKENS,
            min_tokens=7,
            logprobs=2,
        )
        for i in range(len(prompts))
    ]
    let_draft(made, None)
    plain = run(made.engine, prompts, params)
    known = {(tuple(prompts[i]), index): tokens(events) for (i, index), events in plain.items()}
    speculation = let_draft(made, Known(known, QUALITIES[quality]))
    drafted = run(made.engine, prompts, params)
    assert drafted.keys() == plain.keys()
    for key, events in drafted.items():
        assert tokens(events) == tokens(plain[key])
        assert events[-1].finish_reason == plain[key][-1].finish_reason
        got, want = ([one for e in each for one in e.logprobs] for each in (events, plain[key]))
        assert [one.token_id for one in got] == tokens(events)
        assert [one.top_ids for one in got] == [one.top_ids for one in want]
        np.testing.assert_allclose(
            [one.logprob for one in got], [one.logprob for one in want], atol=1e-4
        )
    assert (speculation.stats.tokens["known", "accepted"] > 20) is (quality != "wrong")


@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_real_drafters_change_nothing_and_save_steps(built, speculation):
    """Prompts that repeat themselves; the same ones again, so that the corpus has them."""
    made, config, tensors = built
    made.engine.policy = RandomPolicy(5)
    prompts = [[5, 6, 7, 8] * 5, [9, 10] * 8, [20, 21, 22] * 6]
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = DraftOptions(speculation=speculation, fixed_drafts=True)
    stats = let_draft(made, Drafting(options)).stats
    for _ in range(2):
        events = run(made.engine, prompts, [sampling] * 3)
        for number, prompt in enumerate(prompts):
            expected = numpy_llama.greedy(config, tensors, prompt, 40)
            assert tokens(events[number, 0]) == expected
    assert stats.tokens[speculation, "accepted"] > 40
