"""Tokens with an adapter equal PEFT's, for every family (data of tests/oracle/make_lora.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from adapters_kit import pool_of, serve
from engines import RandomPolicy, build_tiny, tokens
from spent import quick

from shiftjax.core.request import Request, SamplingParams

DATA = Path(__file__).parent.parent / "data"
MODELS = sorted(path.name for path in (DATA / "lora").iterdir() if path.is_dir())
CASES = [(name, 2, 2) for name in MODELS]
QUICK = ("gemma3_text", 2, 2), ("phi3", 2, 2), ("deepseek_v3", 2, 2)
OPTIONS = {"max_model_len": 64, "num_blocks": 60, "max_num_seqs": 4}


@pytest.mark.costs(25)
@pytest.mark.parametrize(("name", "sp", "tp"), quick(CASES, *QUICK, times=1))
def test_tokens_and_log_probabilities_equal_pefts(name, sp, tp):
    """Beside each other with and without the adapter, in random modes, prompts in chunks."""
    here = DATA / "lora" / name
    of_experts = bool(json.loads((here / "adapter_config.json").read_text())["target_parameters"])
    built = build_tiny(
        DATA / "parity" / name,
        sp=sp,
        tp=tp,
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
