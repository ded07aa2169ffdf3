"""How many requests would pass their targets: against a reference that goes token by token."""

import math
import random
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest

from shiftjax.sizing.misses import (
    COMING,
    HORIZON,
    LONGEST,
    MOST_DECODES,
    NEVER,
    SPREAD,
    Coming,
    Owed,
    Steps,
    num_missed,
    owed_to,
)
from shiftjax.targets import NO_TARGETS, Target, Targets


def behind(ahead, pace, busy, steps, answer):
    """How likely an answer ends where it has taken too long, by its tokens in steps of 1/50."""
    chance, num, at = 0.0, busy / steps.each, 0.01
    while at < 12 * answer + 2 * num:
        took = steps.each * min(at, num) + steps.alone * max(0.0, at - num)
        if took - ahead > pace * at:
            chance += math.exp(-at / answer) / answer * 0.02
        at += 0.02
    return chance


def late_later(drain, ttft, coming):
    """Who comes while more waits than the target, if more or less waits than is known now."""
    load = coming.rate * coming.prompt * coming.token
    seconds = LONGEST if load >= 1 else min(LONGEST, 1 / (1 - load))
    more = [SPREAD * ttft * (2 * (i + 0.5) / 4000 - 1) for i in range(4000)]
    return coming.rate * seconds * sum(max(0.0, drain + s - ttft) for s in more) / 4000


def reference(owed, lengths, coming, steps):
    """Requests that would pass their targets, one by one."""
    p, each, _, drain = steps
    (ttft, tpot), rate = owed.usual, COMING * coming.rate
    share = rate * coming.prompt * each / p
    busy = max(drain, min(HORIZON, drain / (1 - share) if share < 1 else HORIZON))
    num = late_later(drain, ttft, coming) if ttft < NEVER else 0.0
    for ahead, pace in zip(owed.ahead, owed.paces, strict=True):
        num += owed.weight * behind(ahead, pace, busy, steps, coming.answer)
    done, end = [], 0
    for length in lengths:
        end += length
        done.append(min(drain, math.ceil(end / p) * each))
    for at, left, pace in zip(done, owed.left, owed.prompt_paces, strict=True):
        slow = behind(0.0, pace, max(0.0, busy - at), steps, coming.answer)
        num += 0.0 if left <= 0 else 1.0 if at > left else slow
    for place in (i / 8 + 1 / 16 for i in range(8)):
        at = done[-1] + place * (drain - done[-1])
        oldest = min(ttft, owed.left[-1])
        left = oldest + place * (ttft - oldest)
        slow = behind(0.0, tpot, max(0.0, busy - at), steps, coming.answer)
        num += coming.num_behind / 8 * (0.0 if left <= 0 else 1.0 if at > left else slow)
        begun = place * busy + max(0.0, drain - place * busy * (1 - share))
        slow = behind(0.0, tpot, max(0.0, busy - begun), steps, coming.answer)
        num += rate * busy / 8 * slow
    return num


def some(rng: random.Random):
    """(owed, lengths, coming, steps) of a queue."""
    lengths = [rng.randrange(1, 6000) for _ in range(rng.randrange(1, 9))]
    num = rng.randrange(0, 5)
    owed = Owed(
        np.array([rng.uniform(-0.3, 2.0) for _ in range(num)]),
        np.array([rng.choice([0.03, 0.05, 0.2]) for _ in range(num)]),
        rng.choice([1.0, 1.5]),
        np.array([rng.choice([-0.2, 0.05, 0.4, 2.0, NEVER]) for _ in lengths]),
        np.array([rng.choice([0.03, 0.05, NEVER]) for _ in lengths]),
        Target(rng.choice([0.5, 1.0, NEVER]), rng.choice([0.04, NEVER])),
    )
    p = rng.choice([200, 1000, 1900, 4000, 8000])
    each = rng.uniform(0.02, 0.15)
    alone = rng.uniform(0.005, min(0.025, each))
    drain = math.ceil(sum(lengths) / p) * each * rng.uniform(0.9, 1.0)
    steps = Steps(p, each, alone, drain)
    rate, answer = rng.choice([0.0, 2.0, 20.0]), rng.choice([8.0, 30.0])
    coming = Coming(rng.choice([0, 0, 12]), rate, rng.uniform(300, 3000), answer, 18e-6)
    return owed, lengths, coming, steps


@pytest.mark.parametrize("seed", range(40))
def test_as_many_pass_their_targets_as_token_by_token(seed):
    owed, lengths, coming, steps = some(random.Random(seed))
    got = num_missed(owed, np.array(list(accumulate(lengths)), float), coming, steps)
    expected = reference(owed, lengths, coming, steps)
    assert got == pytest.approx(expected, rel=0.02, abs=0.02)


def test_nobody_passes_a_target_that_steps_keep():
    """Two prompts are done at once, and 40 ms are no more than any token may take."""
    owed = Owed(np.zeros(3), np.full(3, 0.05), 1.0, np.ones(2), np.full(2, 0.05), Target(1, 0.05))
    steps = Steps(2000, 0.04, 0.01, 0.04)
    coming = Coming(0, 0.0, 1000.0, 100.0, 2e-5)
    assert num_missed(owed, np.array([500.0, 1500.0]), coming, steps) == 0.0


# ------------------------------------------------------------------ what is owed


def sequence(arrival=0.0, first=None, last=0.0, num_tokens=0, priority=0):
    request = SimpleNamespace(arrival_seconds=arrival, priority=priority)
    return SimpleNamespace(
        request=request,
        first_token_seconds=first,
        last_token_seconds=last,
        num_output_tokens=num_tokens,
    )


def decode(*args, **kwargs):
    return SimpleNamespace(sequence=sequence(*args, **kwargs))


TARGETS = Targets(Target(1.0, 0.1), ((5, Target(tpot=0.2)), (9, Target(0.5))))


def test_decodes_are_ahead_by_what_their_tokens_did_not_take():
    decodes = [
        decode(0.0, 0.5, 2.5, 31),  # 30 tokens in 2 s
        decode(0.0, 1.5, 2.5, 31),  # its first one was late
        decode(0.0, 9.0, 9.5, 3, priority=5),  # may be late
        decode(0.0, 0.4, 2.0, 9, priority=9),  # any pace will do
        decode(2.2),  # its first token is in flight
        decode(1.2),  # and will be late
    ]
    owed = owed_to([], decodes, TARGETS, 3.0)
    assert owed.ahead.tolist() == pytest.approx([1.0, 2 * 0.2 - 0.5, 0.0])
    assert owed.paces.tolist() == [0.1, 0.2, 0.1]
    assert owed.weight == 1.0 and owed.usual == Target(1.0, 0.1)


def test_prompts_have_until_their_targets():
    prompts = [
        sequence(2.5),
        sequence(1.5),
        sequence(0.0, priority=5),
        sequence(2.9, priority=9),
        sequence(0.0, first=0.4),  # was preempted
        sequence(0.0, first=1.4),
    ]
    owed = owed_to(prompts, [], TARGETS, 3.0)
    assert owed.left.tolist() == pytest.approx([0.5, -0.5, NEVER - 3, 0.4, NEVER, -2.0])
    assert owed.prompt_paces.tolist() == [0.1, 0.1, 0.2, NEVER, 0.1, 0.1]


def test_of_many_decodes_some_stand_for_all():
    decodes = [decode(0.0, 0.5, 2.5, n) for n in range(200)]
    owed = owed_to([], decodes, TARGETS, 3.0)
    assert len(owed.ahead) <= MOST_DECODES
    assert owed.weight * len(owed.ahead) == pytest.approx(200)


def test_without_targets_nothing_is_owed():
    owed = owed_to([sequence()], [decode(0.0, 0.5, 2.5, 9)], NO_TARGETS, 1e5)
    assert not len(owed.ahead) and owed.left[0] > 0
    coming = Coming(9, 30.0, 4000.0, 100.0, 2e-5)
    assert num_missed(owed, np.array([90_000.0]), coming, Steps(500, 0.1, 0.01, 18.0)) == 0.0
