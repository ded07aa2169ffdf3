"""Prompts that engines must continue as transformers does.

`tests/oracle/make_parity.py` has made the models of `tests/data/parity` and what they say.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from echo_pools import Told
from engines import RandomPolicy, run

from shiftjax.build import Built
from shiftjax.core.request import Request, SamplingParams
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups

DATA = Path(__file__).parent / "data" / "parity"
TWO_WIDTHS = {"fleet": True, "devices": 4, "fleet_widths": (1, 2), "fleet_policy": "context"}


def asked(name: str, known: Iterable[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Two prompts with so many tokens of what follows them behind, and what is to come then."""
    expected = np.load(DATA / name / "expected.npz")
    prompts, answers = [], []
    for num in known:
        for i in range(2):
            greedy = expected[f"greedy_{i}"].tolist()
            prompts.append(expected[f"token_ids_{i}"].tolist() + greedy[:num])
            answers.append(greedy[num:])
    return prompts, answers


def check_continued(
    built: Built, texts: tuple[Sequence[list[int]], Sequence[list[int]]], options: dict[str, Any]
) -> None:
    """Ask twice, in random modes: by the second time prefixes are cached."""
    built.engine.policy = RandomPolicy(3)
    prompts, answers = texts
    sampling = [SamplingParams(max_tokens=len(a), temperature=0, ignore_eos=True) for a in answers]
    for _ in range(2):
        events = run(built.engine, prompts, sampling)
        said = [[t for e in events[i, 0] for t in e.token_ids] for i in range(len(prompts))]
        if "kv_cache_dtype" in options:
            assert list(map(len, said)) == list(map(len, answers))
        else:
            assert said == answers
    stats = built.engine.stats()
    assert stats.num_prefix_hit_tokens > 0
    if "num_blocks" in options:
        assert stats.num_preemptions[options.get("preemption", "recompute")] > 0


def check_moved(engine: Any, texts: tuple[Sequence[list[int]], Sequence[list[int]]]) -> Fleet:
    """Ask a fleet of `TWO_WIDTHS` whose groups change all the time; return it."""
    policy, fleet = Told(), engine.topology.find(Fleet)
    fleet.policy = policy
    prompts, answers = texts
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        sampling = SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True)
        engine.add_request(Request(str(number), prompt, sampling))
    said = [[] for _ in prompts]
    for turn in itertools.count(1):
        if turn % 4 == 1:
            width = 1 if turn % 8 == 1 else 2
            policy.wishes = [Wish(equal_groups(4, width), "told", "move")]
        for event in engine.step(float(turn)):
            said[int(event.request_id)] += event.token_ids
        engine.check()
        if not engine.has_work():
            break
    assert said == answers
    return fleet
