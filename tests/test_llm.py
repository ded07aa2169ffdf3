"""The Python API: what is refused, in which words, and that the engine lives on."""

import math
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from engines import checkpoint
from oracle import numpy_llama
from tokenizers import decoders, models, pre_tokenizers

from shiftjax import LLM, SamplingParams
from shiftjax.core.request import RequestError
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.step_times import predicted
from shiftjax.costs.work import Work
from shiftjax.explain.explanation import UNKNOWN
from shiftjax.options import ConfigError
from shiftjax.text.tokenizer import Tokenizer
from shiftjax.weights.source import CheckpointError

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "num_blocks": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": [16],
    "cache_dir": "none",
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny():
    directory, config, tensors = checkpoint()
    llm = LLM(str(directory), sp=2, tp=1, **OPTIONS)
    yield llm, config, tensors
    llm.close()


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "empty"),
        ([5, 199], {}, "199"),
        ([5, -1], {}, "-1"),
        ([5, 2**31], {}, str(2**31)),
        ([5] * 65, {}, "64"),
        ([5] * 60, {"max_tokens": 5}, "64"),
        ([5], {"max_tokens": 3, "stop_token_ids": [500]}, "500"),
        ([5], {"max_tokens": 3, "logit_bias": {199: 1.0}}, "199"),
        ([5], {"max_tokens": 3, "allowed_token_ids": [4000]}, "4000"),
        ([5], {"max_tokens": 3, "logprobs": 21}, "20"),
        ([5], {"bad_words": ["x"]}, "bad_words needs a tokenizer"),
        ("text without a tokenizer", {}, "tokenizer"),
        ({"prompt": "x"}, {}, "prompt_token_ids"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(tiny, prompt, sampling, words):
    llm, config, tensors = tiny
    prompts = [prompt] if isinstance(prompt, list) else prompt
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, SamplingParams(**sampling))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    (output,) = llm.generate([[5, 6, 7]], GREEDY)
    assert output.outputs[0].token_ids == numpy_llama.greedy(config, tensors, [5, 6, 7], 6)
    llm.engine.check()
    assert llm.stats()["kv_usage"] == 0
    assert llm.stats()["attention"] == {"xla": "the kernels are for GPUs, not for cpu"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", math.inf),
        ("max_tokens", -1),
        ("n", 0),
        ("repetition_penalty", 0),
        ("stop", [""]),
        ("seed", 1.5),
        ("logprobs", -2),
    ],
)
def test_bad_sampling_values_name_their_field(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sp": 3, "tp": 7}, "devices"),
        ({"sp": 0}, "sp"),
        ({"shift_treshold": 5}, "shift_threshold"),
        ({"policy": "fastest"}, "policy"),
        ({"pp": 5}, "pp = 5 is more than .* layers"),
        ({"max_model_len": 100_000, "num_blocks": None}, "positions"),
        ({"block_size": 3}, "power of two"),
        ({"memory_fraction": math.nan}, "memory_fraction"),
    ],
)
def test_impossible_options(options, words):
    directory, _, _ = checkpoint()
    with pytest.raises(ConfigError, match=words):
        LLM(str(directory), **(OPTIONS | options))


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as error:
        LLM("smollm2-135m", sp=0, policy="fastest", blocksize=3)
    assert len(error.value.problems) == 3


def test_a_model_that_is_not_there():
    with pytest.raises(CheckpointError, match="smollm2-135m"):
        LLM("smollm2-135n")


def test_prompt_logprobs_are_those_of_the_oracle(tiny):
    llm, config, tensors = tiny
    prompt = list(range(10, 45))  # longer than a step has rows: collected over several steps
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate([prompt], params)
    logits = numpy_llama.forward(config, tensors, prompt)["logits"]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry.token_id == prompt[position + 1]
        np.testing.assert_allclose(entry.logprob, logprobs[position, entry.token_id], atol=1e-4)
        best = np.argsort(-logprobs[position])[:2]
        assert entry.top_ids == best.tolist()
        np.testing.assert_allclose(entry.top_logprobs, logprobs[position, best], atol=1e-4)
    (first,) = output.outputs[0].logprobs
    assert first.top_ids == np.argsort(-logprobs[-1])[:3].tolist()


def test_continuations_share_the_prompts_blocks(tiny):
    llm, _, _ = tiny
    prompt = list(range(50, 82))
    params = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    texts = [tuple(one.token_ids) for one in output.outputs]
    assert len(set(texts)) == 3
    assert [one.metrics.num_cached_tokens > 0 for one in output.outputs] == [False, True, True]
    (again,) = llm.generate([prompt], params)
    assert [tuple(one.token_ids) for one in again.outputs] == texts
    other = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=6, ignore_eos=True)
    (different,) = llm.generate([prompt], other)
    assert [tuple(one.token_ids) for one in different.outputs] != texts


def test_closing_a_stream_aborts_its_requests(tiny):
    llm, _, _ = tiny
    lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 50)]
    stream = llm.stream([[5, 6], [7, 8]], lengths)
    index, _, output = next(stream)
    assert index == 0
    assert output.is_finished
    assert llm.stats()["num_running"] == 1
    stream.close()
    assert llm.stats()["num_running"] == 0
    rest = llm.generate([[5, 6, 7]], GREEDY)
    assert rest[0].is_finished
    llm.engine.check()


def test_nothing_compiles_after_warm_up(tiny):
    llm, _, _ = tiny
    before = llm.stats()["compiles_after_warmup"]
    params = [
        SamplingParams(max_tokens=5, temperature=t, top_p=0.9, presence_penalty=p, logprobs=k)
        for t, p, k in [(0, 0, None), (1, 0.5, 2), (0.7, 0, 0), (0, 1, 5)]
    ]
    llm.generate([[i + 3] * (5 * i + 1) for i in range(4)], params)
    assert llm.stats()["compiles_after_warmup"] == before == 0


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """A word for every token: w0, <think>, </think>, w3, w4 ..."""
    words = {"<think>": 1, "</think>": 2}
    words |= {f"w{number}": number for number in range(vocab_size) if number not in (1, 2)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template="<think></think>")


def test_bad_words_do_not_come(tiny, monkeypatch):
    llm, config, tensors = tiny
    first, second = numpy_llama.greedy(config, tensors, [5, 6, 7], 2)
    monkeypatch.setattr(llm, "tokenizer", word_tokenizer(config["vocab_size"]))
    banned = replace(GREEDY, bad_words=[f"w{first}"])
    (output,) = llm.generate([[5, 6, 7]], banned)
    assert first not in output.outputs[0].token_ids
    banned = replace(GREEDY, bad_words=[f"w{first} w{second}"])
    (output,) = llm.generate([[5, 6, 7]], banned)
    found = output.outputs[0].token_ids
    assert found[0] == first and found[1] != second


def test_thoughts_end_at_their_budget(tiny, monkeypatch):
    llm, config, tensors = tiny
    monkeypatch.setattr(llm, "tokenizer", word_tokenizer(config["vocab_size"]))
    budget = replace(GREEDY, thinking_token_budget=2, n=2)
    (output,) = llm.generate([[5, 6, 1]], budget)
    thought = numpy_llama.greedy(config, tensors, [5, 6, 1], 2)
    for each in output.outputs:
        assert each.token_ids[:3] == [*thought, 2]
    (output,) = llm.generate([[5, 6, 7]], budget)
    assert output.outputs[0].token_ids == numpy_llama.greedy(config, tensors, [5, 6, 7], 6)


@pytest.mark.costs(8)
def test_it_explains_its_steps_where_the_machine_is_known(tiny):
    """Seconds of a machine's file for the steps that ran; the tokens are those without one."""
    plain, prompts = tiny[0], [[5, 6, 7, 8, 9] * 3, [4]]
    wanted = [out.outputs[0].token_ids for out in plain.generate(prompts, GREEDY)]
    told = plain.explain()
    assert told["steps"] and told["machine"] == "" and told["unknown"] == UNKNOWN
    assert all(step["predicted"] == [] for step in told["steps"])
    llm = LLM(str(checkpoint()[0]), sp=2, tp=1, machine="h200x8", shift_threshold=8, **OPTIONS)
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)] == wanted
    told = llm.explain()
    llm.close()
    costs = llm._built.deployment.costs(load_machine("h200x8"), load_engine("shiftjax"))
    assert told["machine"] == "h200x8" and told["policy"] == "threshold"
    assert {step["mode"] for step in told["steps"]} == {"base", "shift"}
    for step in told["steps"]:
        last = next((m for m in costs.layout.modes if m.label == step["last_mode"]), None)
        work, seconds = Work(**step["work"]), step["predicted"]
        for mode, each in zip(costs.layout.modes, seconds, strict=True):
            assert each["mode"] == mode.label and each["is_allowed"]
            assert each["seconds"] == predicted(costs, mode, last, work, step["is_hidden"])
        assert step["measured_seconds"] > 0
    assert told["sizes"][0]["reason"] == "alone" and told["sizes_unknown"] == ""
