"""Engines that pause, sleep and wake up: who waits, who goes on, and what devices hold."""

import gc
import itertools
import threading

import jax
import pytest
from engines import build_tiny, checkpoint, make, run, tokens
from harness import held_bytes
from rollouts_kit import GREEDY, OPTIONS, PROMPTS, expected, other_weights
from spent import thorough

from shiftjax import LLM
from shiftjax.core.request import Request, RequestError
from shiftjax.costs.memory import block_token_bytes, weight_bytes
from shiftjax.rollouts.control import RolloutError


@pytest.fixture(scope="module")
def llm():
    directory, *_ = checkpoint()
    llm = LLM(str(directory), sp=2, tp=1, **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def awake(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.engine.check()
        assert not llm.is_sleeping and not llm.is_paused


def begin(built, prompts=PROMPTS) -> None:
    for number, prompt in enumerate(prompts):
        name = f"r{number}-{built.engine._num_requests}"
        built.engine.add_request(Request(name, prompt, GREEDY))
    for _ in range(4):
        built.engine.step(0.0)


def total() -> int:
    gc.collect()
    return sum(held_bytes(jax.live_arrays()).values())


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ((2, 2), {}),
        *thorough(
            ((1, 2), {"pp": 2}),
            ((None, 2), {"fleet": True, "devices": 4}),
            ((2, 2), {"quantization": "fp8"}),
            ((1, 2), {"dp": 2}),
        ),
    ],
)
def test_an_engine_asleep_holds_what_is_counted(degrees, options):
    """All weights and all KV leave the devices; one tag after the other brings them back."""
    directory, *_ = checkpoint()
    built = make(directory, *degrees, **options)
    (deployment,) = built.deployments
    prompts = PROMPTS[:3]
    before_texts = run(built.engine, prompts, [GREEDY] * 3)
    before, held = total(), built.rollouts.held_bytes()
    of_weights, of_kv = held["weights"], held["kv_cache"]
    if not {"pp", "fleet"} & options.keys():
        layout, formats = deployment.layout, deployment.formats
        devices = deployment.grid.num_devices
        copied = sum(runner.memory.num_copied_bytes for runner in built.runners)  # scales
        assert of_weights == devices * weight_bytes(layout, formats) + copied
        per_block = deployment.block_size * block_token_bytes(layout, formats)
        assert of_kv == devices * deployment.num_blocks * per_block
    for level in (1, 1):
        built.rollouts.sleep(level, "abort", 0.0)
        assert total() == before - of_weights - of_kv
        assert built.rollouts.held_bytes() == {
            "weights": 0,
            "kv_cache": 0,
            "host": built.rollouts.held_bytes()["host"],
        }
        built.rollouts.wake_up(["weights"])
        assert total() == before - of_kv and built.rollouts.is_paused
        built.rollouts.wake_up(["kv_cache"])
        assert total() == before and not built.rollouts.is_paused
    assert built.rollouts.held_bytes() == held
    after_texts = run(built.engine, prompts, [GREEDY] * 3)
    assert [tokens(e) for e in after_texts.values()] == [tokens(e) for e in before_texts.values()]


@pytest.mark.costs(14)  # of the engine that the others use, too
def test_weights_that_were_dropped_come_with_an_update(llm):
    new = other_weights(1)
    llm.sleep(level=2)
    assert llm.rollouts.held_bytes() == {"weights": 0, "kv_cache": 0, "host": 0}
    llm.wake_up()
    assert llm.is_paused and not llm.is_sleeping
    with pytest.raises(RolloutError, match="lacks weights"):
        llm.resume()
    half = dict(list(new.items())[:7])
    llm.update_weights(half)
    assert llm.is_paused  # not all yet
    llm.update_weights(new)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == [
        expected(new, prompt) for prompt in PROMPTS
    ]
    llm.update_weights(other_weights(0))


def test_requests_that_are_kept_go_on_after_a_sleep(llm, monkeypatch):
    """They are computed again from their tokens; none of these is another one."""
    turns, turn = itertools.count(), llm._turn

    def turn_or_sleep():
        number = next(turns)
        if number in (3, 7):
            llm.sleep(level=1, mode="keep")
            assert llm.stats()["kv_usage"] == 0
            llm.wake_up()
        return turn()

    monkeypatch.setattr(llm, "_turn", turn_or_sleep)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert next(turns) > 8
    old = other_weights(0)
    assert [o.outputs[0].token_ids for o in outputs] == [expected(old, p) for p in PROMPTS]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_what_a_pause_does_to_those_that_run_and_those_that_come(llm, monkeypatch, mode):
    """Another thread pauses and resumes, as a trainer does beside the one that generates."""
    turns, turn, seen = itertools.count(), llm._turn, []
    paused, looked = threading.Event(), threading.Event()

    def trainer():
        llm.pause(mode)
        seen.append((llm.is_paused, llm.engine.num_begun, llm.engine.has_work()))
        paused.set()
        looked.wait(60)
        llm.resume()

    thread = threading.Thread(target=trainer)

    def turn_or_pause():
        if next(turns) == 3:
            assert llm.engine.num_begun
            thread.start()
            paused.wait(60)
            threading.Timer(0.2, looked.set).start()
        return turn()

    monkeypatch.setattr(llm, "_turn", turn_or_pause)
    outputs = [o.outputs[0] for o in llm.generate(PROMPTS, GREEDY)]
    thread.join()
    is_paused, num_begun, has_work = seen[0]
    assert is_paused and not has_work and bool(num_begun) == (mode == "keep")
    if mode == "abort":
        assert {output.finish_reason for output in outputs} == {"abort"}
        return
    assert [o.token_ids for o in outputs] == [expected(other_weights(0), p) for p in PROMPTS]


def test_a_thread_that_has_paused_does_not_wait_for_itself(llm):
    llm.pause()
    with pytest.raises(RequestError, match="resume"):
        llm.generate(PROMPTS[:1], GREEDY)
    llm.resume()
    llm.sleep(level=0)
    assert llm.is_paused and not llm.is_sleeping
    llm.wake_up()
    assert llm.generate(PROMPTS[:1], GREEDY)[0].is_finished


def test_a_pause_outlives_sleep_and_updates(llm):
    llm.pause()
    llm.sleep()
    with pytest.raises(RolloutError, match="sleeps already"):
        llm.sleep()
    with pytest.raises(RolloutError, match="wake it up"):
        llm.resume()
    with pytest.raises(RolloutError, match="weights sleep"):
        llm.update_weights({})
    llm.wake_up()
    assert llm.is_paused
    llm.update_weights(other_weights(0))
    assert llm.is_paused
    llm.resume()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.sleep(level=3), "level"),
        (lambda llm: llm.sleep(mode="soon"), "mode"),
        (lambda llm: llm.pause("soon"), "mode"),
        (lambda llm: llm.wake_up(["kv"]), "tags"),
    ],
)
def test_words_that_mean_nothing_change_nothing(llm, call, words):
    with pytest.raises(RolloutError, match=words):
        call(llm)


@pytest.mark.costs(25)
@pytest.mark.thorough
def test_phases_sleep_with_what_is_parked():
    directory, *_ = checkpoint(num_hidden_layers=4)
    sizes = {"num_blocks": 41, "max_model_len": 96, "token_buckets": [16]}
    sizes |= {"host_memory": "200KB", "max_num_batched_tokens": 16}
    built = build_tiny(directory, phases="pp2tp2:tp4", **sizes)
    old = other_weights(0, num_hidden_layers=4)
    events = {}
    for number, prompt in enumerate(PROMPTS):
        built.engine.add_request(Request(f"r{number}", prompt, GREEDY))
    for turn in itertools.count():
        if not built.engine.has_work():
            break
        for event in built.engine.step(float(turn)):
            events.setdefault(event.request_id, []).append(event)
        if turn % 5 == 3:
            with pytest.raises(RolloutError, match="level must be one of"):
                built.rollouts.sleep(2, "keep", 0.0)
            built.rollouts.sleep(1, "keep", 0.0)
            for event in built.rollouts.take_events():
                events.setdefault(event.request_id, []).append(event)
            assert built.rollouts.held_bytes()["weights"] == 0
            built.rollouts.wake_up()
    for number, prompt in enumerate(PROMPTS):
        assert tokens(events[f"r{number}"]) == expected(old, prompt, num_hidden_layers=4)
    built.engine.check()
