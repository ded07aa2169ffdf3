"""Engines on models with experts: the tokens of an oracle, whatever the mode and the batch."""

import numpy as np
import pytest
from engines import MOE, RandomPolicy, checkpoint, make, run, tokens
from harness import forward
from oracle import numpy_fp8, numpy_llama
from spent import quick

from shiftjax.arch.formats import Formats
from shiftjax.core.request import SamplingParams
from shiftjax.parallel.grid import Mode

PROMPT = [5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150]
PROMPTS = [PROMPT[i:] + PROMPT[: i + 3] for i in range(8)]


def texts(built, seed: int) -> list[list[int]]:
    """Greedy continuations in modes drawn at random."""
    built.engine.policy = RandomPolicy(seed)
    built.engine.flush_prefix_cache()
    sampling = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)] * len(PROMPTS)
    events = run(built.engine, PROMPTS, sampling)
    return [tokens(events[i, 0]) for i in range(len(PROMPTS))]


@pytest.mark.costs(15)
def test_tokens_are_those_of_the_oracle_in_every_mode():
    directory, config, tensors = checkpoint(**MOE)
    built = make(directory, 4, 2, num_blocks=42, token_buckets=[32])
    expected = [numpy_llama.greedy(config, tensors, prompt, 10) for prompt in PROMPTS]
    assert [texts(built, seed) for seed in range(2)] == [expected] * 2
    assert built.engine.stats().steps_by_mode.keys() == {"base", "sp2", "shift"}


USES = [(sp, tp, e) for sp, tp in ((8, 1), (4, 2), (2, 4), (2, 2)) for e in (8, 4, 2, 1) if e <= sp]
QUICK = [(4, 2, 4)]


@pytest.mark.costs(15)
@pytest.mark.parametrize(("sp", "tp", "experts_as"), quick(USES, *QUICK))
def test_tokens_do_not_depend_on_how_far_experts_are_split(sp, tp, experts_as):
    directory, config, tensors = checkpoint(**MOE)
    built = make(directory, sp, tp, num_blocks=42, controls={"experts_as": experts_as})
    (runner,) = built.runners
    (program,) = runner.programs
    used = {runner.step.experts_in(mode, program.bucket.tokens).sp for mode in program.steps}
    assert used == {experts_as}
    expected = [numpy_llama.greedy(config, tensors, prompt, 10) for prompt in PROMPTS]
    assert [texts(built, seed) for seed in range(2)] == [expected] * 2


@pytest.mark.thorough
def test_logits_of_codes_are_those_of_the_same_codes_in_numpy():
    directory, config, tensors = checkpoint(**MOE)
    formats = Formats("fp8", "float32", "float32")
    with numpy_fp8.quantised(o=16, down=8):
        expected = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    plain = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    for mode in (Mode(2, 2), Mode(2, 1)):
        _, logits, _ = forward(directory, PROMPT, 2, 2, mode, "alias", formats=formats)
        far = np.abs(logits - expected).max(axis=-1)
        # Where a number lies at the border of two codes, float32 and float64 may differ.
        assert np.median(far) < 1e-3
        assert np.abs(logits - plain).max() > 10 * np.median(far)
