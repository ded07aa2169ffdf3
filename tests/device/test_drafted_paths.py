"""Drafts of several paths through real steps: the right one may be any, the tokens are the same."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from engines import RandomPolicy, checkpoint, make, run, tokens
from oracle import numpy_llama
from spent import thorough
from test_drafted_steps import VOCAB_SIZE, let_draft
from test_mode_invisibility import OUTPUT_TOKENS, greedy, prompts_with_shared_prefixes

from shiftjax.core.request import SamplingParams
from shiftjax.device.groups import define_steps
from shiftjax.device.programs import CompileCounter, empty_inputs
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting

NUM_PATHS = 3
SWIFTKV = {"model_type": "llama_swiftkv", "num_hidden_layers": 2, "num_key_value_layers": 1}
DEPLOYMENTS = {"sp2tp2": ({}, 2, 2), "swiftkv": (SWIFTKV, 1, 1)}
FEW_BLOCKS = 60  # prompts do not all run together, and paths find room


class Forked(Drafting):
    """Paths of up to 4 tokens; what is known to come is each of them in turn, then none.

    The others begin with another token and go on as the right one, so that a step that mixed up
    their keys and values would sample something else.
    """

    def __init__(self, known):
        options = {"speculation": "suffix", "draft_choice": "fixed", "draft_paths": NUM_PATHS}
        super().__init__(DraftOptions(**options))
        self.known, self.count = known, 0

    def draft(self, name, most):
        done = name.num_output_tokens
        rest = self.known[tuple(name.request.prompt_token_ids), name.index][done:]
        rest = rest[: min(most, 4 - self.count % 3)]
        self.count += 1
        if not rest:
            return None
        paths = []
        for number in range(NUM_PATHS):
            shift = number - self.count % (NUM_PATHS + 1)
            guesses = [(rest[0] + shift) % VOCAB_SIZE, *rest[1:]]
            paths.append(self.rated(name, guesses, [0.5] * len(guesses), f"path {number}"))
        return paths[0]._replace(others=tuple(paths[1:]))


@pytest.fixture(
    scope="module",
    params=["swiftkv", *thorough("sp2tp2")],
)
def built(request):
    overrides, sp, tp = DEPLOYMENTS[request.param]
    directory, config, tensors = checkpoint(**overrides)
    options = {"speculation": "suffix", "draft_paths": NUM_PATHS, "max_draft_rows": 24}
    made = make(directory, sp, tp, whole=True, num_blocks=FEW_BLOCKS, token_buckets=[32], **options)
    (runner,) = made.runners
    for program, mode in itertools.product(runner.programs, runner.step.weights.modes):
        runner.compiled(program, mode)  # a random policy chooses any
    return made, config, tensors


def assert_every_path_was_right_once(speculation):
    drafted = speculation.stats.tokens
    for number in range(NUM_PATHS):
        assert drafted[f"path {number}", "accepted"] > 0 < drafted[f"path {number}", "rejected"]


def test_greedy_tokens_equal_the_oracle_whichever_path_is_right(built):
    """With prefix hits, chunks and random modes; nothing is compiled for paths."""
    made, config, tensors = built
    made.engine.policy = RandomPolicy(3)
    prompts = prompts_with_shared_prefixes(1)
    expected = [numpy_llama.greedy(config, tensors, p, OUTPUT_TOKENS) for p in prompts]
    known = {(tuple(p), 0): ids for p, ids in zip(prompts, expected, strict=True)}
    speculation = let_draft(made, Forked(known))
    hits, counter = made.engine.stats().num_prefix_hit_tokens, CompileCounter()
    counter.start()
    events = run(made.engine, prompts, [greedy()] * len(prompts))
    counter.stop()
    for number, ids in enumerate(expected):
        assert tokens(events[number, 0]) == ids
    assert made.engine.stats().num_prefix_hit_tokens > hits
    assert_every_path_was_right_once(speculation)
    assert counter.count == 0


def test_sampled_tokens_are_those_without_drafts(built):
    """Counts, positions, min_tokens and log-probabilities are those of the path that stays."""
    made, _, _ = built
    made.engine.policy = RandomPolicy(4)
    prompts = prompts_with_shared_prefixes(5, 6)
    params = [
        SamplingParams(
            temperature=1.1,
            top_k=50 if i % 2 else 0,
            frequency_penalty=0.3 * (i % 3),
            repetition_penalty=1.2,
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
    speculation = let_draft(made, Forked(known))
    drafted = run(made.engine, prompts, params)
    assert drafted.keys() == plain.keys()
    for key, events in drafted.items():
        assert tokens(events) == tokens(plain[key])
        assert events[-1].finish_reason == plain[key][-1].finish_reason
        got, want = ([one for e in each for one in e.logprobs] for each in (events, plain[key]))
        assert [one.token_id for one in got] == tokens(events)
        np.testing.assert_allclose(
            [one.logprob for one in got], [one.logprob for one in want], atol=1e-4
        )
    assert_every_path_was_right_once(speculation)


def test_steps_of_one_path_know_of_no_copies(built):
    made, (runner,) = built[0], built[0].runners
    (one_path,) = define_steps(
        replace(made.deployment, drafts=DraftOptions()), jax.devices()
    ).values()
    for program in runner.programs:
        several, one = program.packing, empty_inputs(one_path, runner.pool, program.bucket)[0]
        assert several.size - one.size == 2 * program.bucket.seqs
