"""Llama 4 on engines, contexts of many chunks: against transformers' tokens.

Prompts have 768 and 130 tokens, chunks 64 or 96.
"""

import pytest
from continued import DATA, TWO_WIDTHS, asked, check_continued, check_moved
from engines import build_tiny
from spent import quick

NORMED, PLAIN = "llama4_chunks", "llama4_chunks_128e"
# Steps of 50 tokens: some cross the start of a chunk, others end there.
SIZES = {"max_model_len": 800, "max_num_batched_tokens": 50, "token_buckets": [50]}
# Of 4 tokens in all layers: what is asked together does not fit to its end. Stages have one table;
# others free blocks behind chunks, and are preempted in device/test_freed_blocks.py.
FEW = {"num_blocks": 229}
SWAPS = {"preemption": "swap", "host_memory": "8MiB"}
KNOWN = (0, 7)  # tokens of an answer that a prompt has: later ones begin with the first
CASES = [(name, *split) for name in (NORMED, PLAIN) for split in ((2, 2, {}), (4, 2, SWAPS))]
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
    check_continued(built, asked(name, KNOWN), options)


@pytest.mark.thorough
def test_running_sequences_move_between_groups_of_two_widths():
    built = build_tiny(DATA / NORMED, sp=None, tp=1, **SIZES, num_blocks=600, **TWO_WIDTHS)
    fleet = check_moved(built.engine, asked(NORMED, KNOWN))
    assert fleet.stats.num_moved_sequences > 1
