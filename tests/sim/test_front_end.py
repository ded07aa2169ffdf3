"""The front end of a server: what it does to requests, and to the steps of those that stream."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from shiftjax.core.request import Request, SamplingParams
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.sim.arrivals import InOrder
from shiftjax.sim.closed_loop import closed_loop
from shiftjax.sim.experiments import target_from
from shiftjax.sim.front_end import FrontEnd, opening_seconds, reading_seconds
from shiftjax.sim.modelled import cost_model
from shiftjax.sim.models import MODELS
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import TraceRequest

TARGET = target_from({"model": "llama-8b", "machine": "h100x8", "engine": "vllm"})
OFFLINE = replace(TARGET, engine=TARGET.engine.offline)
STREAMS = replace(TARGET, engine=replace(TARGET.engine.completions, request_seconds=0.0))
READING = TARGET.engine.request_seconds + TARGET.engine.chat_seconds
WAIT = READING + TARGET.engine.chat_latency_seconds
ALONE = deploy(TARGET, "dp=1,sp=1,tp=1,policy=base", max_num_seqs=512)


def sent_at(*moments: float) -> InOrder:
    sampling = SamplingParams(max_tokens=1)
    return InOrder(Request(str(n), (1, 2), sampling, at) for n, at in enumerate(moments))


def ready(front: FrontEnd) -> list[tuple[float, float]]:
    """(when it is ready, when it was sent) of each."""
    seen = []
    while front.next_seconds < inf:
        seen.append((front.next_seconds, front.take().arrival_seconds))
    return seen


def test_requests_that_come_together_are_ready_together():
    assert ready(FrontEnd(sent_at(*[1.0] * 5), 0.4)) == [(pytest.approx(3.0), 1.0)] * 5


def test_a_later_request_shares_what_is_left():
    """Two of 0.4 s are half done at 1.4; a third has a third of the process, then all of it."""
    seen = ready(FrontEnd(sent_at(1.0, 1.0, 1.4, 9.0), 0.4))
    expected = [(2.0, 1.0), (2.0, 1.0), (2.2, 1.4), (9.4, 9.0)]
    assert [pytest.approx(pair) for pair in expected] == seen


def test_latency_delays_each_request_and_no_other():
    quick, slow = (ready(FrontEnd(sent_at(0.0, 0.0, 0.5), 0.1, late)) for late in (0.0, 0.7))
    assert slow == [(pytest.approx(at + 0.7), sent) for at, sent in quick]


def test_the_first_prompts_wait_until_attention_is_compiled():
    """What comes later does not; with FlashAttention-3 there is nothing to compile."""
    seen = ready(FrontEnd(sent_at(1.0, 1.0, 4.0), 0.1, 0.0, 2.0))
    assert [at for at, _ in seen] == [pytest.approx(at) for at in (3.0, 3.0, 4.1)]
    engine = load_engine("sglang")
    waits = {name: opening_seconds(engine, load_machine(name)) for name in ("a100x8", "h100x8")}
    assert waits == {"a100x8": engine.compiling_seconds, "h100x8": 0.0}
    assert engine.compiling_seconds > engine.offline.compiling_seconds == 0


def test_chats_take_more_of_the_front_end_than_completions():
    trace, engine = [TraceRequest(0.0, 100, 4)], TARGET.engine
    texts = replace(TARGET, engine=engine.completions)
    (chat,), (text,) = (replay(trace, each, ALONE).requests for each in (TARGET, texts))
    more = engine.chat_seconds + engine.chat_latency_seconds
    assert more > 0.02 and chat.ttft - text.ttft == pytest.approx(more)


def test_a_chat_takes_what_the_template_of_its_model_takes():
    usual, short, none = (
        reading_seconds(TARGET.engine, MODELS[name])
        for name in ("llama-8b", "qwen3-235b-a22b", "gpt-oss-20b")
    )
    engine = TARGET.engine
    assert usual == READING
    assert short == pytest.approx(engine.request_seconds + engine.chat_seconds / 2)
    assert none == engine.request_seconds


def test_a_request_counts_from_when_it_was_sent():
    trace = [TraceRequest(3.0, 100, 4)]
    (alone,), (served,) = (replay(trace, each, ALONE).requests for each in (OFFLINE, TARGET))
    assert served.arrival == alone.arrival == 3.0
    assert served.ttft - alone.ttft == pytest.approx(WAIT)
    assert served.tpot == pytest.approx(alone.tpot)


def test_a_burst_waits_for_all_of_it_to_be_read():
    burst = replay([TraceRequest(0.0, 16, 1)] * 200, TARGET, ALONE).requests
    assert min(each.ttft for each in burst) > 200 * READING


def test_a_user_asks_again_when_the_answer_is_there():
    requests = replay(closed_loop([TraceRequest(0.0, 50, 3)] * 3, 1), TARGET, ALONE).requests
    for earlier, later in pairwise(requests):
        assert later.arrival == pytest.approx(earlier.arrival + earlier.completion)


def test_streams_beyond_the_free_ones_cost_each_step():
    engine = TARGET.engine
    free = engine.free_streams
    more = engine.host(free + 100, 1) - engine.offline.host(free + 100, 1)
    assert more == pytest.approx(100 * engine.stream_seconds)
    assert engine.host(free, 1) == engine.offline.host(free, 1)


def test_many_streams_are_slower_than_a_batch_of_as_many():
    """Where nothing overlaps, a step takes so much longer."""
    trace = [TraceRequest(0.0, 10, 40)] * 256
    served, batch = (replay(trace, each, ALONE).steps for each in (STREAMS, OFFLINE))
    gaps = [steps[-1].done - steps[-2].done for steps in (served, batch)]
    expected = (256 - TARGET.engine.free_streams) * TARGET.engine.stream_seconds
    assert gaps[0] - gaps[1] == pytest.approx(expected, rel=0.01)


def test_an_engine_that_overlaps_hides_its_streams_behind_the_devices():
    ours = target_from({"model": "llama-8b", "machine": "h100x8", "engine": "shiftjax"})
    trace = [TraceRequest(0.0, 10, 40)] * 64
    deployment = deploy(ours, "dp=1,sp=1,tp=1,policy=base")
    alone = replace(ours, engine=ours.engine.offline)
    streams = replace(ours, engine=replace(ours.engine, request_seconds=0.0))
    served, batch = (replay(trace, each, deployment).steps for each in (streams, alone))
    assert ours.engine.stream_seconds > 0
    assert served[-1].done - served[-2].done == pytest.approx(batch[-1].done - batch[-2].done)


def test_a_hot_chip_computes_slower_and_reads_as_fast():
    cool = replace(TARGET, machine=replace(TARGET.machine, sustained_efficiency=1.0))
    hot, cold = (cost_model(each, ALONE) for each in (TARGET, cool))
    mode = hot.layout.base
    ratio = hot.products_seconds(mode, 8192) / cold.products_seconds(mode, 8192)
    assert ratio == pytest.approx(1 / TARGET.machine.sustained_efficiency, rel=0.02)
    assert hot.products_seconds(mode, 8) == pytest.approx(cold.products_seconds(mode, 8), rel=0.01)
