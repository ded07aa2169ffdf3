"""Engines whose virtual devices take real time: times of a replay, and tokens that are valid."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.config import EngineConfig
from shiftjax.core.request import Request, RequestError, SamplingParams
from shiftjax.options import ConfigError
from shiftjax.sim.devices import WallClock
from shiftjax.sim.experiments import target_of
from shiftjax.sim.live import deploy_live, live_engine
from shiftjax.sim.replay import TracePrompt, replay, serve
from shiftjax.sim.trace import TraceRequest, poisson

IDS = range(32, 127)
SETTINGS = {
    "shift": {"sp": 4, "tp": 2},
    "cost": {"policy": "cost"},
    "replicas": {"dp": 4, "tp": 2},
    "stages": {"pp": 2, "tp": 4},
    "fleet": {"fleet": True, "tp": 2},
}


class Wall:
    """A clock on the wall of a room in which nothing but waiting takes time."""

    def __init__(self):
        self.seconds, self.waits = 100.0, []

    def read(self):
        return self.seconds

    def sleep(self, seconds):
        assert seconds > 0
        self.waits.append(seconds)
        self.seconds += seconds


def config_of(**options):
    given = {"model": "llama-70b", "quantization": "fp8", "max_model_len": 8192}
    return EngineConfig.from_options(**given | options)


def opened(config, wall):
    target = target_of(config, config.model.model, "h200x8")
    clock = WallClock(wall.read, wall.sleep)
    deployment = deploy_live(target, config)
    return target, deployment, clock, live_engine(target, deployment, IDS, clock=clock)


def requests_of(trace, begin):
    for number, each in enumerate(trace):
        sampling = SamplingParams(max_tokens=each.num_output_tokens, ignore_eos=True)
        prompt = TracePrompt(each, number, 1000)
        yield Request(str(number), prompt, sampling, begin + each.arrival_seconds)


@pytest.mark.parametrize("name", SETTINGS)
def test_requests_take_as_long_as_in_a_replay(name):
    """A lone one, and then many that wait for each other."""
    trace = [TraceRequest(0.0, 1000, 20), *poisson(30.0, 1.0, 900, 12)]
    trace = [trace[0], *(TraceRequest(2 + t.arrival_seconds, 900, 12) for t in trace[1:])]
    wall = Wall()
    target, deployment, clock, engine = opened(config_of(**SETTINGS[name]), wall)
    records, num_refused = serve(engine, clock, requests_of(trace, wall.seconds))
    assert not num_refused and wall.waits
    engine_alone = replace(target, engine=target.engine.offline)
    expected = replay(trace, engine_alone, deployment).requests
    for live, virtual in zip(records, expected, strict=True):
        for time in ("queue", "ttft", "tpot", "completion"):
            assert getattr(live, time) == pytest.approx(getattr(virtual, time), abs=1e-6)


def finished(engine, clock, *requests):
    """Token ids, and why it ended, of each request by its id."""
    for request in requests:
        engine.add_request(request)
    tokens, reasons = {request.request_id: [] for request in requests}, {}
    while engine.has_work():
        for event in engine.step(clock.now):
            tokens[event.request_id] += event.token_ids
            reasons[event.request_id] = event.finish_reason
    return tokens, reasons


@pytest.fixture(scope="module")
def live():
    _, _, clock, engine = opened(config_of(), Wall())
    return engine, clock, count()


@given(seed=st.integers(0, 2**31 - 1), others=st.integers(0, 5), most=st.integers(1, 40))
def test_tokens_depend_on_the_seed_and_the_position_alone(live, seed, others, most):
    engine, clock, names = live

    def request(prompt, own):
        sampling = SamplingParams(max_tokens=most, seed=own, ignore_eos=True)
        return Request(f"r{next(names)}", prompt, sampling)

    first = request([1] * 9, seed)
    crowd = [request([2, number], number) for number in range(others)]
    alone, _ = finished(engine, clock, first)
    again = request([1] * 9, seed)
    among, reasons = finished(engine, clock, *crowd, again)
    assert alone[first.request_id] == among[again.request_id]
    assert len(alone[first.request_id]) == most and set(alone[first.request_id]) <= set(IDS)
    assert set(reasons.values()) == {"length"}


def test_answers_end_by_themselves_and_not_too_soon(live):
    engine, clock, _ = live
    (eos, *_) = engine.limits.eos_token_ids
    given = SamplingParams(max_tokens=4000, min_tokens=300)
    asked = [Request(f"end{n}", [n], SamplingParams(max_tokens=4000)) for n in range(60)]
    late = [Request(f"late{n}", [n], given) for n in range(20)]
    tokens, reasons = finished(engine, clock, *asked, *late)
    assert set(reasons.values()) == {"stop"}
    lengths = [len(tokens[f"end{n}"]) for n in range(60)]
    assert 128 < np.mean(lengths) < 512  # 256 are expected, with a deviation of 33
    assert all(len(tokens[f"late{n}"]) >= 300 for n in range(20))
    assert all(each.index(eos) == len(each) - 1 for each in tokens.values())


def test_what_may_follow_follows(live):
    engine, clock, _ = live
    given = SamplingParams(max_tokens=50, allowed_token_ids=(7, 9), min_tokens=50)
    tokens, _ = finished(engine, clock, Request("few", [1], given))
    assert set(tokens["few"]) == {7, 9}
    stop = SamplingParams(max_tokens=500, stop_token_ids=tuple(IDS[:50]))
    _, reasons = finished(engine, clock, Request("stopped", [1], stop))
    assert reasons == {"stopped": "stop"}


def test_nobody_can_say_how_likely_made_up_tokens_are(live):
    engine, _, _ = live
    for sampling in (SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=0)):
        with pytest.raises(RequestError, match="no model gives the tokens"):
            engine.add_request(Request("r", [1], sampling))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculation": "ngram"}, "speculation = ngram cannot be had on simulated devices"),
        ({"task": "embed"}, "task = embed cannot be had"),
        ({"phases": "pp8:tp8"}, "phases = pp8:tp8 cannot be had"),
        ({"policy": "cost", "machine": "l4x8"}, "machine = l4x8 is not simulated on h200x8"),
        ({"devices": 16}, "16"),
    ],
)
def test_what_is_not_simulated_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        opened(config_of(**options), Wall())
