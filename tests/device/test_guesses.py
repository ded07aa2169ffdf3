"""A speculator drafts in the step: what it guesses is the oracle's, and no token changes.

The one deployment that has everything: shifting modes, SwiftKV, suffix drafts and a speculator.
"""

import itertools
import tempfile
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import RandomPolicy, checkpoint, make, run, tokens
from oracle import numpy_llama, numpy_sampling, numpy_speculator
from spent import thorough
from test_drafted_steps import let_draft
from test_mode_invisibility import CROWDED, OUTPUT_TOKENS, greedy, prompts_with_shared_prefixes

from shiftjax.core.policies import make_policy
from shiftjax.core.request import SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.speculation import DraftStats

VOCAB_SIZE, HIDDEN = 199, 48
COMMON = {"vocab_size": VOCAB_SIZE, "n_predict": 3, "tie_weights": True, "scale_input": True}
MLP = COMMON | {
    "architectures": ["ArcticMLPSpeculatorPreTrainedModel"],
    "emb_dim": HIDDEN,
    "inner_dim": 256,
}
LSTM = COMMON | {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "method": "sum_lstm",
    "input_hidden_dim": HIDDEN,
    "tie_lstm_embs": True,
    "emb_dim": 48,
    "inner_dim": 48,
    "proj_dim": 48,
}
SWIFTKV = {"model_type": "llama_swiftkv", "num_hidden_layers": 2, "num_key_value_layers": 1}
DEPLOYMENTS = {"lstm": (LSTM, {}, 2, 2), "mlp, swiftkv": (MLP, SWIFTKV, 4, 2)}


@cache
def expected_outputs(**overrides) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what the target says to each."""
    _, config, tensors = checkpoint(**overrides)
    prompts = prompts_with_shared_prefixes(1)
    return prompts, [numpy_llama.greedy(config, tensors, p, OUTPUT_TOKENS) for p in prompts]


def knowing_pairs(config: dict, outputs: list[list[int]]) -> dict[str, np.ndarray]:
    """An MLP that ignores hidden states and knows what followed each token in these outputs."""
    tensors = numpy_speculator.random_tensors(config, seed=3)
    tensors |= {name: 0 * x for name, x in tensors.items() if name.startswith("proj")}
    hidden = np.zeros(config["emb_dim"])
    tensors["head.0.weight"] = np.eye(VOCAB_SIZE, config["inner_dim"], dtype=np.float32)
    unit = {"head.0.weight": np.eye(config["inner_dim"])}
    states = [
        numpy_speculator.logits_of(config, tensors | unit, hidden, [token])
        for token in range(VOCAB_SIZE)
    ]
    pairs = dict(pair for ids in outputs for pair in itertools.pairwise(ids))
    wanted = 0.1 * np.random.default_rng(4).standard_normal((VOCAB_SIZE, VOCAB_SIZE))
    wanted[list(pairs), list(pairs.values())] = 1.0
    head = np.linalg.lstsq(np.array(states), wanted, rcond=None)[0].T
    return tensors | {"head.0.weight": np.ascontiguousarray(9 * head, np.float32)}


class Recorded(Drafting):
    """Keeps every guess of the model with what it was told to follow."""

    def __init__(self, options: DraftOptions):
        super().__init__(options)
        self.guesses = []

    def extend(self, name, tokens, guess=None):
        super().extend(name, tokens, guess)
        if guess is not None:
            self.guesses.append((name, list(name.token_ids), guess))


@pytest.fixture(
    scope="module",
    params=["mlp, swiftkv", *thorough("lstm")],
)
def built(request):
    config, overrides, sp, tp = DEPLOYMENTS[request.param]
    directory, *target = checkpoint(**overrides)
    tensors = numpy_speculator.random_tensors(config, seed=5)
    if config is MLP:
        tensors = knowing_pairs(config, expected_outputs(**overrides)[1])
    where = numpy_speculator.save(Path(tempfile.mkdtemp()), config, tensors)
    options = {"speculation": "hybrid", "draft_model": str(where)}
    options["controls"] = {"max_draft_rows": 24}
    options |= {"draft_choice": "fill", "token_buckets": [8, 32] if sp == 2 else [32]}
    made = make(directory, sp, tp, whole=True, num_blocks=CROWDED, policy="cost", **options)
    (runner,) = made.runners
    for program in runner.programs:
        for mode in (made.deployment.layout.base, made.deployment.layout.shift):
            runner.compiled(program, mode)
    return made, target, (config, tensors), overrides


def draft_by(built, speculation: str) -> Recorded:
    options = DraftOptions(speculation, "-", fixed_drafts=True, draft_max_seqs=0)
    drafting = Recorded(options)
    let_draft(built[0], drafting, num_guesses=3)
    return drafting


@pytest.mark.costs(15)
def test_an_engine_that_is_built_with_a_speculator_drafts_by_it(built):
    made, _, _, overrides = built
    prompts, expected = expected_outputs(**overrides)
    events = run(made.engine, prompts[:2], [greedy()] * 2)
    assert [tokens(events[i, 0]) for i in range(2)] == expected[:2]
    assert sum(made.engine.stats().find(DraftStats).by_drafter["model"].values()) > 0


@pytest.mark.parametrize("policy", ["random", "threshold", "cost"])
@pytest.mark.parametrize("speculation", ["model", "hybrid"])
def test_greedy_tokens_equal_the_oracles(built, speculation, policy):
    """With preemption, prefix hits, chunks; in the modes that policies choose, and at random."""
    made, _, (config, _), overrides = built
    own = made.engine.policy
    policies = {
        "random": RandomPolicy(3, ends=True),
        "threshold": make_policy("threshold", 8),
        "cost": own,
    }
    prompts, expected = expected_outputs(**overrides)
    drafting = draft_by(built, speculation)
    made.engine.policy = policies[policy]
    before, counter = made.engine.stats(), CompileCounter()
    counter.start()
    events = run(made.engine, prompts, [greedy()] * len(prompts))
    counter.stop()
    made.engine.policy = own
    assert [tokens(events[i, 0]) for i in range(len(prompts))] == expected
    drafted = made.engine.stats().find(DraftStats).tokens
    assert drafted["model", "accepted"] + drafted["model", "rejected"] > 20
    if config is MLP and speculation == "model":
        assert drafted["model", "accepted"] > 20
    assert made.engine.stats().num_prefix_hit_tokens > before.num_prefix_hit_tokens
    assert drafting.guesses and counter.count == 0


def noise_of(made, sequence, position: int) -> np.ndarray:
    """The noise of all tokens that may be drawn at a position."""
    key = jax.random.wrap_key_data(made.runners[0].packer._key, impl="threefry2x32")
    for word in (sequence.seed & 0xFFFFFFFF, sequence.seed >> 32, position):
        key = jax.random.fold_in(key, word)
    words = jax.random.bits(key, (2,), dtype=jnp.uint32)
    return numpy_sampling.noise(np.asarray(words), VOCAB_SIZE)


def test_what_is_guessed_is_what_the_oracle_guesses(built):
    """After prompts, after plain tokens, after drafts that were right and wrong."""
    made, (config, tensors), speculator, _ = built
    drafting = draft_by(built, "hybrid")
    prompts = prompts_with_shared_prefixes(8, 5)
    sampling = [
        SamplingParams(temperature=0.0 if i % 2 else 0.7, seed=i, max_tokens=8, ignore_eos=True)
        for i in range(len(prompts))
    ]
    run(made.engine, prompts, sampling)
    seen = drafting.guesses[:: max(1, len(drafting.guesses) // 12)]
    assert len(seen) >= 10
    for sequence, token_ids, guess in seen:
        if len(token_ids) == sequence.max_length:
            continue
        hidden = numpy_llama.forward(config, tensors, token_ids[:-1])["hidden_states"][-1][-1]
        temperature = sequence.request.sampling.temperature
        noise = [noise_of(made, sequence, len(token_ids) + i) for i in range(3)]
        args = hidden, token_ids[-1], 3, None, temperature, noise
        wanted, probabilities = numpy_speculator.draft(*speculator, *args)
        assert guess.tokens == wanted
        np.testing.assert_allclose(guess.probabilities, probabilities, atol=1e-4)


def test_sampled_tokens_are_those_without_a_speculator(built):
    made = built[0]
    prompts = prompts_with_shared_prefixes(5, 6)
    params = [
        SamplingParams(
            temperature=1.0,
            top_k=20 if i % 2 else 0,
            frequency_penalty=0.2 * (i % 3),
            seed=i,
            n=1 + i % 2,
            max_tokens=OUTPUT_TOKENS,
            min_tokens=5,
            stop_token_ids=(7, 12, 13),
        )
        for i in range(len(prompts))
    ]
    let_draft(made, None)
    plain = run(made.engine, prompts, params)
    drafting = draft_by(built, "hybrid")
    drafted = run(made.engine, prompts, params)
    assert {k: tokens(e) for k, e in drafted.items()} == {k: tokens(e) for k, e in plain.items()}
    assert drafting.guesses
