"""Engines that compute prompts before they decode: steps, and whom they admit."""

from dataclasses import replace

import pytest

from shiftjax.sim import prompts_first
from shiftjax.sim.columns import latencies
from shiftjax.sim.experiments import target_from
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import TraceRequest

SGLANG = target_from({"model": "llama-8b", "machine": "h100x8", "engine": "sglang"})
SGLANG = replace(SGLANG, engine=SGLANG.engine.offline)
MIXED = replace(SGLANG, engine=replace(SGLANG.engine, prompts_first=False))
ONE = "dp=1,sp=1,tp=1,policy=base,max_num_seqs=64,max_num_batched_tokens=1024"
BURST = [TraceRequest(0.1 * (n > 8), 700, 30) for n in range(24)]


def played(target, requests=BURST, words=ONE, **budgets):
    found = replay(requests, target, deploy(target, words, **budgets))
    assert len(found.requests) == len(requests) and not found.num_refused
    return found


def mixes(found):
    """Steps with prompts and decodes in one."""
    return [step for step in found.steps if 0 < step.num_decodes < step.num_tokens]


def test_no_step_has_prompts_and_decodes():
    assert not mixes(played(SGLANG))
    assert mixes(played(MIXED))


def test_first_tokens_come_sooner_and_the_others_later():
    first, mixed = played(SGLANG).requests, played(MIXED).requests
    sums = [(sum(latencies(each, "ttft")), max(latencies(each, "tpot"))) for each in (first, mixed)]
    assert sums[0][0] < sums[1][0] and sums[0][1] > sums[1][1]


def test_prompts_longer_than_a_step_are_computed_in_chunks_before_any_decode():
    found = played(SGLANG, [TraceRequest(0.0, 100, 40), TraceRequest(0.05, 5000, 4)])
    sizes = [step.num_tokens for step in found.steps if step.num_tokens > 1 > step.num_decodes]
    assert sizes == [100, 1024, 1024, 1024, 1024, 904]


def most_running(found):
    return max(step.num_decodes for step in found.steps)


def test_room_is_kept_for_a_share_of_the_answers(monkeypatch):
    """Of 96 blocks of 16 tokens: 4 prompts of 160 with answers of 300 each do not all start."""
    requests = [TraceRequest(0.0, 160, 300) for _ in range(6)]
    few = most_running(played(SGLANG, requests, num_blocks=97))
    monkeypatch.setattr(prompts_first, "FIRST", 0.0)
    monkeypatch.setattr(prompts_first, "LEAST", 0.0)
    many = most_running(played(SGLANG, requests, num_blocks=97))
    assert few < many
    # 160 + 300 of the new one, and 0.7 of 300 for each that runs, beside what they hold.
    assert few == 3


def test_who_is_alone_starts_whatever_the_answer():
    found = played(SGLANG, [TraceRequest(0.0, 160, 1300)], num_blocks=97)
    assert found.requests[0].num_output_tokens == 1300


@pytest.mark.parametrize("engine", ["vllm", "tensorrt_llm", "shiftjax"])
def test_other_engines_mix(engine):
    target = target_from({"model": "llama-8b", "machine": "h100x8", "engine": engine})
    assert mixes(played(replace(target, engine=target.engine.offline)))
