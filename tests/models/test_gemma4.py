"""Gemma 4 on engines: layers whose KV heads have two shapes, against transformers' tokens."""

import pytest
from continued import DATA, TWO_WIDTHS, asked, check_continued, check_moved
from engines import build_tiny, make
from spent import quick

MODELS = sorted(path.name for path in DATA.glob("gemma4*"))
SWAPS = {"preemption": "swap", "host_memory": "4MiB"}
FEW = {"num_blocks": 26, "max_model_len": 64}  # of 4 tokens: too few for all prompts at once
KNOWN = (0, 5, 11)  # tokens of an answer that a prompt has: later ones begin with the first
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


@pytest.mark.costs(20)
@pytest.mark.parametrize(("name", "sp", "tp", "options"), quick(CASES, *QUICK))
def test_an_engine_says_what_transformers_says(name, sp, tp, options):
    built = make(DATA / name, sp, tp, **options)
    check_continued(built, asked(name, KNOWN), options)


@pytest.mark.thorough
def test_running_sequences_move_between_groups_of_two_widths():
    """There and back, by the exchange of both shapes."""
    name = "gemma4_text"
    built = build_tiny(DATA / name, sp=None, tp=1, **TWO_WIDTHS)
    fleet = check_moved(built.engine, asked(name, KNOWN))
    assert fleet.stats.num_moved_sequences > 3
