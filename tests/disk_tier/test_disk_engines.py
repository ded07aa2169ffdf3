"""Engines of different layouts, one after the other, over one directory."""

import pytest
from engines import checkpoint, make, run, tokens
from oracle import numpy_llama

from shiftjax.build import Built
from shiftjax.core.request import SamplingParams
from shiftjax.disk_tier.disk_stats import DiskStats

PROMPTS = [[(7 * i + 31 * stem) % 190 + 3 for i in range(60)] for stem in range(4)]
NUM_CACHED = 56  # never the last token, and whole blocks
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SIZES = {"max_model_len": 100, "num_blocks": 36, "max_num_seqs": 4, "token_buckets": [32]}


def serve(built: Built, stem: int) -> int:
    """Serve a prompt and compare with the oracle: its cached tokens."""
    _, config, tensors = checkpoint(num_hidden_layers=3)
    events = run(built.engine, [PROMPTS[stem]], [GREEDY])
    assert tokens(events[0, 0]) == numpy_llama.greedy(config, tensors, PROMPTS[stem], 4)
    return events[0, 0][-1].metrics.num_cached_tokens


@pytest.mark.costs(12)
def test_another_layout_goes_on_after_a_restart(tmp_path):
    """Written by stages of uneven layers, read by 4 devices that share a head, and back."""
    directory, *_ = checkpoint(num_hidden_layers=3)
    options = {"host_memory": "4MB", "disk_cache_dir": str(tmp_path), **SIZES}

    def staged() -> Built:
        return make(directory, 1, 1, pp=2, **options)

    def split() -> Built:
        return make(directory, 2, 2, policy="base", **options)

    found = []
    for start in (staged, split, staged):
        built = start()
        disk = built.engine.lanes[0].scheduler.tables.tier._disk
        disk._own[0].submit(lambda: None).result()  # files have been looked at
        found.append([serve(built, stem) for stem in range(4)])
        assert built.engine.stats().num_failed_steps == 0
        hits = built.engine.stats().find(DiskStats).num_hit_tokens
        assert hits == sum(found[-1])
        built.engine.close()
    assert found[0] == [0] * 4
    assert found[1][:2] == found[2][:2] == [NUM_CACHED] * 2
    assert found[1][2:] == [NUM_CACHED] * 2  # were on devices alone
