"""Random histories of requests, pauses, sleep and updates: no wrong token, and nothing is left."""

import gc
import random

import jax
import pytest
from engines import RandomPolicy, checkpoint, make
from harness import held_bytes
from oracle import numpy_llama
from rollouts_kit import other_weights

from shiftjax.core.request import Event, Request, SamplingParams

NUM_WEIGHTS = 3
NUM_ACTS = 14
MOST_TOKENS = 6
CHECKED_LOGIT = 1e-3  # a token may be any whose logit is as close to the best


class History:
    """One engine, and what each request has been told with which weights."""

    def __init__(self, built, seed: int, number: int):
        self.built, self.random = built, random.Random(seed)
        self.told: dict[str, list[tuple[int, int]]] = {}  # tokens with their versions
        self.prompts: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.number = number  # of the weights that it has
        self.weights = {built.rollouts.version: number}  # by version
        self.level = 0
        self.name = f"{seed}"

    def hear(self, events: list[Event]) -> None:
        for event in events:
            assert event.error is None and event.request_id not in self.ends
            self.told[event.request_id] += [(token, event.version) for token in event.token_ids]
            if event.finish_reason is not None:
                self.ends[event.request_id] = event.finish_reason

    def begin(self) -> None:
        for _ in range(self.random.randrange(1, 4)):
            name = f"{self.name}-{len(self.prompts)}"
            stem = [*range(3, 3 + self.random.randrange(1, 24))]
            self.prompts[name] = [*stem, self.random.randrange(3, 199)]
            self.told[name] = []
            tokens = self.random.randrange(1, MOST_TOKENS + 1)
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            self.built.engine.add_request(Request(name, self.prompts[name], sampling))

    def step(self) -> None:
        for _ in range(self.random.randrange(1, 5)):
            self.hear(self.built.engine.step(0.0))

    def pause(self) -> None:
        self.built.rollouts.pause(self.random.choice(("keep", "wait", "abort")), 0.0)

    def resume(self) -> None:
        rollouts = self.built.rollouts
        if not rollouts.is_sleeping and rollouts._store.is_whole:
            rollouts.resume()

    def sleep(self) -> None:
        rollouts = self.built.rollouts
        if not rollouts.is_sleeping and rollouts._store.is_whole:
            self.level = self.random.choice((1, 1, 2))
            rollouts.sleep(self.level, self.random.choice(("keep", "abort")), 0.0)
            held = rollouts.held_bytes()
            assert (held["weights"], held["kv_cache"]) == (0, 0)

    def wake_up(self) -> None:
        tags = self.random.choice((None, ["weights"], ["kv_cache"]))
        if self.built.rollouts.is_sleeping:
            self.built.rollouts.wake_up(tags)

    def update(self) -> None:
        rollouts = self.built.rollouts
        if "weights" in rollouts.asleep and self.level == 1:
            return
        self.number = self.random.randrange(NUM_WEIGHTS)
        rollouts.update(other_weights(self.number), 0.0, recompute=True)
        self.weights[rollouts.version] = self.number

    def finish(self) -> None:
        rollouts = self.built.rollouts
        rollouts.wake_up()
        if not rollouts._store.is_whole:
            self.update()
        rollouts.resume()
        for _ in range(2000):
            self.hear(rollouts.take_events())
            if not self.built.engine.has_work():
                return
            self.hear(self.built.engine.step(0.0))
        raise AssertionError("it does not come to its end")

    def run(self) -> None:
        acts = [self.begin, self.step, self.step, self.pause, self.resume]
        acts += [self.sleep, self.wake_up, self.update]
        self.begin()
        for _ in range(NUM_ACTS):
            self.random.choice(acts)()
            self.hear(self.built.rollouts.take_events())
            self.built.engine.check()
        self.finish()
        assert self.ends.keys() == self.prompts.keys()
        self.built.engine.check()
        assert self.built.engine.num_begun == 0 and not self.built.engine.names

    def check(self, config: dict) -> None:
        """Every token is the best that its weights say after those before it."""
        for name, told in self.told.items():
            ids = [*self.prompts[name], *(token for token, _ in told)]
            for version in {version for _, version in told}:
                tensors = other_weights(self.weights[version])
                logits = numpy_llama.forward(config, tensors, ids)["logits"]
                first = len(self.prompts[name])
                for place, (token, own) in enumerate(told):
                    if own == version:
                        row = logits[first + place - 1]
                        assert row[token] >= row.max() - CHECKED_LOGIT, (name, place, version)


def held() -> int:
    gc.collect()
    return sum(held_bytes(jax.live_arrays()).values())


@pytest.mark.parametrize(
    ("degrees", "options", "count"),
    [
        pytest.param((2, 2), {}, 12, marks=pytest.mark.costs(15)),
        pytest.param((2, 2), {}, 120, marks=(pytest.mark.thorough, pytest.mark.costs(90))),
        pytest.param(
            (None, 2),
            {"fleet": True, "devices": 4},
            40,
            marks=(pytest.mark.thorough, pytest.mark.costs(90)),
        ),
        pytest.param(
            (1, 2),
            {"host_memory": "100KB", "num_blocks": 24, "preemption": "swap"},
            40,
            marks=(pytest.mark.thorough, pytest.mark.costs(60)),
        ),
    ],
)
def test_random_histories(degrees, options, count):
    directory, config, _ = checkpoint()
    built = make(directory, *degrees, max_model_len=40, **({"num_blocks": 60} | options))
    built.engine.policy = RandomPolicy(1)
    bytes_held, number = None, 0
    for seed in range(count):
        history = History(built, seed, number)
        history.run()
        number = history.number
        history.check(config)
        if seed in (1, count - 1):
            now = held()
            assert bytes_held in (None, now)
            bytes_held = now
