"""Histories of a fleet on devices: requests of every kind, groups that change at random, aborts."""

import itertools
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from echo_pools import Told

from shiftjax.build import Built
from shiftjax.core.policy import Policy
from shiftjax.core.request import Event, Request, SamplingParams
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import Arrangement, all_groups, bound, equal_groups
from shiftjax.parallel.grid import Group

KINDS = ("move", "move", "soft", "hard", "sequential")
REQUESTS = ("greedy", "seeded", "constrained", "stopped", "repeating")  # by turns
NUM_REQUESTS = 20
STOPS = {str(number) for number in range(REQUESTS.index("stopped"), NUM_REQUESTS, len(REQUESTS))}
VOCAB_SIZE = 199
STATES = frozenset({"queued", "closing", "paused", "moved"})  # in which requests are aborted
READY = 0.7  # of the times that a step is asked whether it is ready, it is
Named = dict[tuple[str, int], list[Event]]


class Counting:
    """A constraint: number i of the output must leave i % 3 when it is divided by 3."""

    decides_end = True

    def __init__(self):
        self.num, self.mask = 0, self._mask(0)

    def _mask(self, num: int) -> np.ndarray:
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
        bits[num % 3 : VOCAB_SIZE : 3] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> bool:
        assert token_id % 3 == self.num % 3, "a token that was not allowed"
        self.num += 1
        self.mask = self._mask(self.num)
        return True

    def masks_along(self, draft: list[int]) -> list[np.ndarray]:
        allowed = itertools.takewhile(lambda e: e[1] % 3 == e[0] % 3, enumerate(draft, self.num))
        return [self.mask, *(self._mask(number + 1) for number, _ in allowed)]

    def forced_tokens(self, most: int) -> list[int]:
        return []


def requests_of(seed: int) -> list[Request]:
    """New ones each time, because constraints have a state; greedy, seeded, constrained, stopped.

    Those of `STOPS` end at the first token that `is_stop` names, as at a text that is found in it.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    found = []
    for number in range(NUM_REQUESTS):
        prompt = shared[: rng.choice([0, 0, 16, 33])]
        prompt = prompt + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
        n, most = rng.choice([1, 1, 2]), rng.randrange(8, 40)
        kind = REQUESTS[number % len(REQUESTS)]
        fields = {"max_tokens": most, "logprobs": 2, "temperature": 0.0, "n": n}
        if kind in ("seeded", "constrained", "stopped"):
            fields |= {"temperature": 1.0, "seed": number, "top_p": rng.choice([1.0, 0.9])}
        if kind == "seeded":
            fields |= {"repetition_penalty": 1.2, "logit_bias": {20: 4.0, 21: -4.0}}
            fields |= {"stop_token_ids": (20, 30), "min_tokens": 5}
        if kind == "repeating":
            prompt = (prompt[:5] * 12)[:50]
        is_free = kind in ("greedy", "stopped", "repeating")
        constraints = tuple(Counting() for _ in range(n)) if kind == "constrained" else ()
        sampling = SamplingParams(**fields, ignore_eos=is_free)
        found.append(Request(str(number), prompt, sampling, constraints=constraints))
    return found


def is_stop(token: int) -> bool:
    return token % 17 == 5


def random_arrangement(rng: random.Random, units: int, widths: tuple[int, ...]) -> Arrangement:
    found = equal_groups(units, widths[0])
    groups = all_groups(units, widths)
    for group in rng.sample(groups, rng.randrange(1, len(groups))):
        if all(other.width <= group.width for other in found if other.overlaps(group)):
            found = bound(found, group)
    return found


class AnyCompiled(Policy):
    """A mode drawn at random from those in which a plan's step is compiled."""

    def __init__(self, runner, rng: random.Random):
        self.runner, self.random = runner, rng

    def mode_of(self, work, modes, num_waiting, last_mode):
        raise AssertionError("only a plan says which programs there are")

    def choose(self, plan, modes, num_waiting, last_mode):
        return self.random.choice(list(self.runner.program_for(plan).steps))


def play(
    built: Built, requests, seed: int | None, preemption="recompute", aborts: Collection[str] = ()
) -> tuple[Named, Counter[str]]:
    """Serve requests that come one by one; with a seed, groups change at random.

    Of every state in `aborts` the first request that is seen in it is aborted. A step is seen to be
    ready at random, so that what happens is the same on a machine of any speed. Returns the events,
    and how often what happened.
    """
    engine, rng = built.engine, random.Random(seed)
    policy, seen = Told(), Counter()
    engine.topology.find(Fleet).policy = policy
    for lane in engine.lanes:
        lane.policy = AnyCompiled(lane.runner, rng)
        lane.runner.is_ready = lambda handle: rng.random() < READY
        lane.scheduler.tables.clear_cache()
        lane.scheduler.config = replace(lane.scheduler.config, preemption=preemption)
    todo, turn = list(requests), 0
    found: Named = {}
    while todo or engine.has_work():
        for _ in range(1 if seed is None else rng.randrange(3)):
            if todo:
                engine.add_request(todo.pop(0))
        if seed is not None and rng.random() < (0.5 if unfinished(engine) else 0.25):
            units, widths = built.deployment.grid.units, built.deployment.widths
            wished = random_arrangement(rng, units, widths)
            policy.wishes = [Wish(wished, "told", rng.choice(KINDS))]
        events = abort_one(engine, set(aborts) - set(seen), seen)
        chunks = unfinished(engine)
        events += engine.step(float(turn))
        after = unfinished(engine)
        seen["cut"] += sum(name in after and after[name] != group for name, group in chunks.items())
        for event in events:
            found.setdefault((event.request_id, event.index), []).append(event)
            if event.request_id in STOPS and any(map(is_stop, event.token_ids)):
                for last in engine.finish(event.request_id, event.index, "stop"):
                    found[event.request_id, event.index].append(last)
        engine.check()
        turn += 1
    return found, seen


def abort_one(engine, states: set[str], seen: Counter[str]) -> list[Event]:
    """Abort a request that is in one of these states now."""
    by_state = {lane.state: lane.scheduler.requests for lane in engine.lanes}
    for lane in engine.lanes:
        if lane.group in engine.topology.find(Fleet)._unproven:
            by_state["moved"] = lane.scheduler.requests
    by_state["queued"] = engine._queued
    for state in sorted(states):
        for name in by_state.get(state, ()):
            seen[state] += 1
            return engine.abort(name)
    return []


def unfinished(engine) -> dict[tuple[str, int], Group]:
    """Sequences of whose prompts a part is computed, and their groups."""
    return {
        (sequence.request.request_id, sequence.index): lane.group
        for lane in engine.lanes
        for sequence in lane.scheduler.running
        if 0 < sequence.num_computed_tokens < sequence.num_prompt_tokens
    }


def heard(events: list[Event]) -> list[tuple[int, float]]:
    """Tokens with their log-probabilities, up to where a stop was seen."""
    return [
        (token, each.logprob)
        for event in events
        for token, each in zip(event.token_ids, event.logprobs, strict=True)
    ]


def assert_same(found: Named, wanted: Named) -> None:
    """Tokens and log-probabilities; of what was aborted, as far as it came.

    A stop may be seen a token later where tokens come by twos; what counts ends with it.
    """
    assert found.keys() <= wanted.keys()
    for name, events in wanted.items():
        got, want = heard(found.get(name, [])), heard(events)
        if name not in found or found[name][-1].finish_reason == "abort":
            want = want[: len(got)]
        elif name[0] in STOPS:
            got, want = (until_stop(each) for each in (got, want))
        else:
            assert found[name][-1].finish_reason == events[-1].finish_reason
        assert [token for token, _ in got] == [token for token, _ in want], name
        np.testing.assert_allclose([p for _, p in got], [p for _, p in want], atol=2e-4)


def until_stop(tokens: list[tuple[int, float]]) -> list[tuple[int, float]]:
    stop = next((place for place, (token, _) in enumerate(tokens) if is_stop(token)), len(tokens))
    return tokens[: stop + 1]
