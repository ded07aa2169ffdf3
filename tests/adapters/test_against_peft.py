"""Tokens with an adapter equal PEFT's, for every family (data of tests/oracle/make_lora.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from adapters_kit import pool_of, serve
from engines import RandomPolicy, build_tiny, tokens
from spent import exhaustive, thorough

from shiftjax.core.request import Request, SamplingParams

DATA = Path(__file__).parent.parent / "data"
MODELS = sorted(path.name for path in (DATA / "lora").iterdir() if path.is_dir())
QUICK = "gemma3_text", "phi3", "deepseek_v3"
# Biases, padded heads, norms of all heads, parallel blocks, experts beside attention and with
# adapters, other heads by layer; others are of these kinds.
THOROUGH = "qwen2", "qwen3", "olmo2", "cohere", "gemma4_text", "gemma4_experts"
THOROUGH += "qwen3_moe", "gpt_oss", "glm4", "deepseek_v2"
REST = sorted({*MODELS}.difference(QUICK, THOROUGH))
OPTIONS = {"max_model_len": 64, "num_blocks": 60, "max_num_seqs": 4}


@pytest.mark.costs(25)
@pytest.mark.parametrize("name", [*QUICK, *thorough(*THOROUGH), *exhaustive(*REST)])
def test_tokens_and_log_probabilities_equal_pefts(name):
    """Beside each other with and without the adapter, in random modes, prompts in chunks."""
    here = DATA / "lora" / name
    of_experts = bool(json.loads((here / "adapter_config.json").read_text())["target_parameters"])
    built = build_tiny(
        DATA / "parity" / name,
        sp=2,
        tp=2,
        enable_lora=True,
        lora_modules=f"own={here}",
        max_lora_rank=8,
        lora_experts=of_experts,
        **OPTIONS,
    )
    built.engine.policy = RandomPolicy(0)
    expected, prompts = (
        np.load(here / "expected.npz"),
        np.load(DATA / "parity" / name / "expected.npz"),
    )
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    key, wanted = pool_of(built).key_of("own"), {}
    for i in (0, 1):
        prompt = prompts[f"token_ids_{i}"].tolist()
        for adapter in (None, key):
            wanted[f"{i} {adapter}"] = Request(f"{i} {adapter}", prompt, greedy, adapter=adapter)
    events = serve(built, list(wanted.values()))
    for i in (0, 1):
        with_one, without = events[f"{i} {key}"], events[f"{i} None"]
        assert tokens(with_one) == expected[f"greedy_{i}"].tolist()
        assert tokens(without) == expected[f"plain_{i}"].tolist()
        logprobs = [entry.logprob for event in with_one for entry in event.logprobs]
        np.testing.assert_allclose(logprobs, expected[f"logprobs_{i}"], atol=1e-3)
