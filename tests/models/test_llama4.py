"""Llama 4 on engines, contexts of many chunks: against transformers' tokens.

`tests/oracle/make_parity.py` has made the models and what they say; a prompt with the first of its
tokens must be continued by the others. Prompts have 768 and 130 tokens, chunks 64 or 96.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_pools import Told
from engines import RandomPolicy, build_tiny, run
from spent import quick

from shiftjax.core.request import Request, SamplingParams
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups

DATA = Path(__file__).parent.parent / "data" / "parity"
NORMED, PLAIN = "llama4_chunks", "llama4_chunks_128e"
# Steps of 50 tokens: some cross the start of a chunk, others end there.
SIZES = {"max_model_len": 800, "max_num_batched_tokens": 50, "token_buckets": [50]}
FEW = {"num_blocks": 229}  # of 4 tokens: what is asked together does not fit to its end
SWAPS = {"preemption": "swap", "host_memory": "8MiB"}


def asked(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and their continuations; the later ones begin with the first."""
    expected = np.load(DATA / name / "expected.npz")
    prompts, answers = [], []
    for known in (0, 7):
        for i in range(2):
            greedy = expected[f"greedy_{i}"].tolist()
            prompts.append(expected[f"token_ids_{i}"].tolist() + greedy[:known])
            answers.append(greedy[known:])
    return prompts, answers


CASES = [
    (name, *split)
    for name in (NORMED, PLAIN)
    for split in ((1, 1, {}), (2, 2, {}), (4, 2, FEW | SWAPS), (1, 8, FEW))
]
CASES += [
    (NORMED, 2, 2, {"speculation": "suffix"}),
    (NORMED, 2, 2, {"speculation": "ngram", "deterministic": True}),
    (NORMED, 2, 2, {"weights": "gather"}),
    (NORMED, 2, 1, {"pp": 2} | FEW | SWAPS),
    (PLAIN, 1, 2, {"pp": 2}),
]
QUICK = [(NORMED, 2, 2, {})]


@pytest.mark.costs(15)
@pytest.mark.parametrize(("name", "sp", "tp", "options"), quick(CASES, *QUICK))
def test_an_engine_says_what_transformers_says(name, sp, tp, options):
    built = build_tiny(DATA / name, sp=sp, tp=tp, **({"num_blocks": 600} | SIZES | options))
    built.engine.policy = RandomPolicy(3)
    prompts, answers = asked(name)
    sampling = [SamplingParams(max_tokens=len(a), temperature=0, ignore_eos=True) for a in answers]
    for _ in range(2):  # the second time on cached prefixes
        events = run(built.engine, prompts, sampling)
        said = [[t for e in events[i, 0] for t in e.token_ids] for i in range(len(prompts))]
        assert said == answers
    stats = built.engine.stats()
    assert stats.num_prefix_hit_tokens > 0
    if "num_blocks" in options:
        assert stats.num_preemptions[options.get("preemption", "recompute")] > 0


@pytest.mark.thorough
def test_running_sequences_move_between_groups_of_two_widths():
    options = {"fleet": True, "devices": 4, "fleet_widths": (1, 2), "fleet_policy": "context"}
    built = build_tiny(DATA / NORMED, sp=None, tp=1, **SIZES, num_blocks=600, **options)
    engine: Any = built.engine
    policy = Told()
    fleet = engine.topology.find(Fleet)
    fleet.policy = policy
    prompts, answers = asked(NORMED)
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
    assert fleet.stats.num_moved_sequences > 1
