"""Adapters of the Python API."""

import pytest
import rollouts_kit
from adapters_kit import adapter, expected, modules
from engines import checkpoint

from shiftjax import LLM
from shiftjax.adapters.adapter import AdapterError
from shiftjax.core.request import RequestError, SamplingParams

FEW = {"num_hidden_layers": 1}
OPTIONS = rollouts_kit.OPTIONS | {"sp": 1, "tp": 1}
PROMPTS = [[5, 17, 99], [3, 42, 7], [64, 30, 11, 150]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.costs(15)
def test_prompts_are_continued_with_the_adapters_that_are_named(monkeypatch):
    directory, *_ = checkpoint(**FEW)
    llm = LLM(str(directory), enable_lora=True, lora_modules=modules(1, **FEW), **OPTIONS)
    llm.load_adapter("second", str(adapter(2, **FEW)[0]))
    names = [None, "a1", "second"]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, adapter=names)
    for ids, seed, output in zip(PROMPTS, (None, 1, 2), outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected(tuple(ids), seed, **FEW)
    assert llm.num_compiles == 0 and sorted(llm.adapters.names) == ["a1", "second"]
    monkeypatch.setattr(llm, "_encode_chat", lambda ids, **_: ids[0])
    (output,) = llm.chat([[PROMPTS[0]]], GREEDY, adapter="second")
    *_, (_, _, last) = llm.stream_chat([PROMPTS[0]], GREEDY, adapter="second")
    for each in (output, last):
        assert list(each.outputs[0].token_ids) == expected(tuple(PROMPTS[0]), 2, **FEW)
    llm.unload_adapter("second")
    for wrong, words in (("second", "no adapter 'second'"), (["a1"], "3 prompts but 1 adapters")):
        with pytest.raises(RequestError, match=words):
            llm.generate(PROMPTS, GREEDY, adapter=wrong)
    with pytest.raises(AdapterError, match="already"):
        llm.load_adapter("a1", str(adapter(1, **FEW)[0]))
    llm.close()


def test_an_engine_without_room_says_so():
    directory, *_ = checkpoint(**FEW)
    llm = LLM(str(directory), **OPTIONS)
    with pytest.raises(AdapterError, match="enable_lora"):
        llm.load_adapter("a1", str(adapter(1, **FEW)[0]))
    with pytest.raises(RequestError, match="enable_lora"):
        llm.generate([PROMPTS[0]], GREEDY, adapter="a1")
    llm.close()
