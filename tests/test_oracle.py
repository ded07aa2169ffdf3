"""SmolLM2-135M's greedy tokens equal Hugging Face transformers' on meshes, under policies.

SP 8 and TP 8 are the modes of a group of a fleet: test_oracle_fleet.py. Small models have the other
meshes (device/test_mode_invisibility.py).
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from engines import RandomPolicy
from harness import silent
from lean import greedy_steps
from oracle.smollm2 import (
    ALL,
    CASES,
    FEW,
    NEEDS_WEIGHTS,
    OPTIONS,
    SHORT,
    THRESHOLD,
    compare,
)
from spent import exhaustive, thorough

from shiftjax import LLM
from shiftjax.build import build
from shiftjax.config import EngineConfig
from shiftjax.core.policies import FixedPolicy, make_policy
from shiftjax.core.request import SamplingParams
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.source import TensorSource

BFLOAT16_MARGIN = 0.15  # a near-tie that bfloat16 may turn

pytestmark = NEEDS_WEIGHTS


def open_llm(sp: int, tp: int, dtype: str, **options) -> LLM:
    with greedy_steps():
        return LLM("smollm2-135m", sp=sp, tp=tp, dtype=dtype, **(OPTIONS | options))


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


@pytest.mark.costs(30)
def test_two_devices_begin_as_transformers_does():
    """Base and shift, the shortest prompts: the one real model of the quick suite."""
    small = {"max_num_batched_tokens": 16, "token_buckets": [16], "max_num_seqs": 2}
    llm = open_llm(2, 1, "float32", shift_threshold=8, max_model_len=64, **small)
    compare(llm.engine, "threshold", make_policy("threshold", 8), FEW, 6)
    steps = llm.stats()["steps_by_mode"]
    assert steps["base"] > 0 and steps["shift"] > 0
    llm.close()


@pytest.fixture(scope="module")
def one_device():
    llm = LLM("smollm2-135m", sp=1, tp=1, dtype="float32", **OPTIONS)
    yield llm
    llm.close()


@pytest.mark.thorough
def test_one_device_gives_the_tokens_of_transformers(one_device):
    """Base and shift are one program here; the long prompt is in this test alone."""
    compare(one_device.engine, "threshold", make_policy("threshold", THRESHOLD), ALL, 32)


# (4, 2) has a mode between, and replicates KV heads; (3, 3) splits the 9 heads without padding.
@pytest.mark.parametrize(("sp", "tp"), [*thorough((4, 2)), *exhaustive((3, 3))])
def test_every_mode_gives_the_tokens_of_transformers(sp, tp):
    llm = open_llm(sp, tp, "float32")
    compare(llm.engine, "threshold", make_policy("threshold", THRESHOLD), SHORT, 16)
    compare(llm.engine, "random", RandomPolicy(sp * 10 + tp, ends=True), SHORT, 5)
    stats = llm.stats()
    assert stats["compiles_after_warmup"] == 0
    assert stats["steps_by_mode"]["base"] > 0 and stats["steps_by_mode"]["shift"] > 0
    if sp == 4:  # tokens split two ways: a threshold has it not compiled ahead, so it is now
        compare(llm.engine, "between", FixedPolicy(1), SHORT, 5)
        assert llm.stats()["steps_by_mode"]["sp2"] > 0
    llm.close()


@pytest.mark.exhaustive  # tiny models have it in models/test_swiftkv.py
def test_a_late_layer_that_is_its_own_gives_the_same_tokens():
    """Only sampled rows pass the last layer; all else of it is what it was."""
    source = OwnLastLayer(open_source(resolve_model("smollm2-135m")))
    config = EngineConfig.from_options(sp=2, tp=1, dtype="float32", **OPTIONS)
    with greedy_steps():
        engine = build(config, source, silent).engine
    compare(engine, "threshold", make_policy("threshold", THRESHOLD), SHORT, 16)
    compare(engine, "random", RandomPolicy(1), SHORT, 5)


@pytest.mark.thorough
def test_bfloat16_differs_at_near_ties_only():
    llm = open_llm(2, 2, "bfloat16")
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    short = [CASES[i] for i in SHORT]
    outputs = llm.generate([{"prompt_token_ids": case["prompt_ids"]} for case in short], greedy)
    for case, output in zip(short, outputs, strict=True):
        pairs = zip(output.outputs[0].token_ids, case["generated_ids"], strict=False)
        first = next((i for i, (got, want) in enumerate(pairs) if got != want), None)
        if first is not None:
            assert case["top1_top2_margin"][first] < BFLOAT16_MARGIN, case["name"]
    llm.close()


@pytest.mark.thorough
def test_text_in_and_text_out(one_device):
    llm = one_device
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
