"""Attention of steps that have decodes and prompts: one kernel for both, or one for each."""

from dataclasses import replace

import pytest

from shiftjax.costs.work import Work
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model
from shiftjax.sim.named import deploy

DECODES, CONTEXT, PROMPT = 100, 4000, 1000


def attention(machine: str, engine: str = "vllm", mixes: bool | None = None) -> list[float]:
    """Seconds of steps of decodes, of a prompt, and of both."""
    target = target_from({"model": "qwen3-14b", "machine": machine, "engine": engine})
    if mixes is not None:
        target = replace(target, engine=replace(target.engine, mixes_attention=mixes))
    costs = cost_model(target, deploy(target, "dp=1,sp=1,tp=1,policy=base"))
    decodes, prompt = Work.decode(DECODES, CONTEXT), Work.prefill(PROMPT)
    both = Work(*map(sum, zip(decodes, prompt, strict=True)))
    return [costs.breakdown(costs.layout.base, each).attention for each in (decodes, prompt, both)]


@pytest.mark.parametrize(("machine", "engine"), [("h100x8", "vllm"), ("a100x8", "sglang")])
def test_decodes_cost_no_more_beside_prompts_where_kernels_pack_them(machine, engine):
    decodes, prompt, both = attention(machine, engine)
    assert both < decodes + prompt


def test_a_decode_beside_a_prompt_takes_a_tile_of_64_queries():
    """4 h D FLOP for each pair of the tile, at the rate of prompts."""
    decodes, prompt, both = attention("a100x8")
    apart = attention("a100x8", mixes=False)
    assert [decodes, prompt] == apart[:2]
    flops = 4 * 40 * 128 * 64 * DECODES * CONTEXT * 40
    machine = target_from({"model": "qwen3-14b", "machine": "a100x8"}).machine
    seconds = flops / machine.matmul_flops["bfloat16"] / machine.attention_efficiency
    assert both - prompt == pytest.approx(seconds, rel=0.01)
    assert both > 1.8 * apart[2]


@pytest.mark.parametrize("engine", ["vllm-v0", "sglang", "tensorrt_llm", "shiftjax"])
def test_other_engines_have_kernels_of_their_own_for_decodes(engine):
    target = target_from({"model": "qwen3-14b", "machine": "a100x8", "engine": engine})
    assert not target.engine.mixes_attention
