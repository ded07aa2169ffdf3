"""Gemma 4 on engines: layers whose KV heads have two shapes, against transformers' tokens.

`tests/oracle/make_parity.py` has made the models and what they say; a prompt with the first of its
tokens must be continued by the others.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_pools import Told
from engines import RandomPolicy, build_tiny, make, run
from spent import quick

from shiftjax.core.request import Request, SamplingParams
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups

DATA = Path(__file__).parent.parent / "data" / "parity"
MODELS = sorted(path.name for path in DATA.glob("gemma4*"))
SWAPS = {"preemption": "swap", "host_memory": "4MiB"}
FEW = {"num_blocks": 26, "max_model_len": 64}  # of 4 tokens: too few for all prompts at once


def asked(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and their continuations; the later ones begin with the first."""
    expected = np.load(DATA / name / "expected.npz")
    prompts, answers = [], []
    for known in (0, 5, 11):
        for i in range(2):
            greedy = expected[f"greedy_{i}"].tolist()
            prompts.append(expected[f"token_ids_{i}"].tolist() + greedy[:known])
            answers.append(greedy[known:])
    return prompts, answers


CASES = [
    (name, sp, tp, options)
    for name in MODELS
    for sp, tp, options in ((2, 2, {}), (4, 2, FEW | SWAPS), (1, 8, FEW))
]
CASES += [
    ("gemma4_text", sp, tp, options)
    for sp, tp, options in (
        (1, 1, {}),
        (8, 1, FEW | SWAPS),
        (3, 2, FEW),
        (2, 2, {"kv_cache_dtype": "fp8"}),
        (2, 2, {"weights": "gather"}),
        (2, 2, {"speculation": "ngram"}),
    )
]
CASES += [(name, 2, 1, {"pp": 2} | FEW | SWAPS) for name in ("gemma4_text", "gemma4_experts")]
QUICK = [case for case in CASES if case[1:3] == (4, 2)]


@pytest.mark.costs(12)
@pytest.mark.parametrize(("name", "sp", "tp", "options"), quick(CASES, *QUICK))
def test_an_engine_says_what_transformers_says(name, sp, tp, options):
    built = make(DATA / name, sp, tp, **options)
    built.engine.policy = RandomPolicy(3)
    prompts, answers = asked(name)
    sampling = [SamplingParams(max_tokens=len(a), temperature=0, ignore_eos=True) for a in answers]
    for _ in range(2):  # the second time on cached prefixes
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


@pytest.mark.thorough
def test_running_sequences_move_between_groups_of_two_widths():
    """There and back, by the exchange of both shapes."""
    name = "gemma4_text"
    options = {"fleet": True, "devices": 4, "fleet_widths": (1, 2), "fleet_policy": "context"}
    engine: Any = build_tiny(DATA / name, sp=None, tp=1, **options).engine
    policy = Told()
    fleet = engine.topology.find(Fleet)
    fleet.policy = policy
    prompts, answers = asked(name)
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
    assert fleet.stats.num_moved_sequences > 3
