"""Models whose layers differ from Llama's: the engine's tokens are transformers', in any mode."""

from pathlib import Path

import numpy as np
import pytest
from engines import RandomPolicy, build_tiny, make, run, tokens
from spent import thorough

from shiftjax.core.request import SamplingParams

PARITY = Path(__file__).parent.parent / "data" / "parity"


@pytest.mark.costs(10)
@pytest.mark.parametrize(
    ("name", "sp", "tp"),
    [
        ("gemma3_text", 2, 2),  # windows and rotary embeddings by layer, norms around
        *thorough(("olmo2", 3, 2)),  # norms over heads that devices split, share and pad
        *thorough(("gpt_oss_mxfp4", 2, 2)),  # sinks, experts with biases, from codes
    ],
)
def test_tokens_are_those_of_transformers_under_random_modes(name, sp, tp):
    expected = np.load(PARITY / name / "expected.npz")
    built = make(PARITY / name, sp, tp)
    built.engine.policy = RandomPolicy(5)
    prompts = [expected[f"token_ids_{i}"].tolist() for i in range(2)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    events = run(built.engine, prompts, [sampling] * 2)
    for i in range(2):
        assert tokens(events[i, 0]) == expected[f"greedy_{i}"].tolist()
    assert min(built.engine.stats().mode_switches.values()) > 0


def test_stages_whose_layers_have_other_windows_take_the_work_of_their_own():
    expected = np.load(PARITY / "gemma3_text" / "expected.npz")
    built = build_tiny(PARITY / "gemma3_text", pp=2, sp=1, tp=1)  # two kinds, then one of them
    prompts = [expected[f"token_ids_{i}"].tolist() for i in range(2)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    events = run(built.engine, prompts, [sampling] * 2)
    for i in range(2):
        assert tokens(events[i, 0]) == expected[f"greedy_{i}"].tolist()
