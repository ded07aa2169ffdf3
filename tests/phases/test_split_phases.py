"""Phases whose devices split positions of KV: parts of stripes go from one to the other."""

from pathlib import Path

import numpy as np
import pytest
from engines import build_tiny, checkpoint, crowd, run, tokens
from oracle import numpy_llama
from spent import exhaustive, thorough

from shiftjax.core.request import SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.phases.resharding import ReshardingState

PARITY = Path(__file__).parent.parent / "data" / "parity"
TWO_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"num_blocks": 41, "max_model_len": 96, "token_buckets": [16], "host_memory": "200KB"}
SIZES |= {"max_num_batched_tokens": 16}


@pytest.mark.costs(25)
@pytest.mark.parametrize(
    ("phases", "ways", "options"),
    [
        ("pp2tp2:tp4", (1, 2), {"kv_split": "position"}),
        *thorough(("tp4:pp4", (2, 1), {"kv_split": "position"})),
        *exhaustive(("dp2tp4:sp4tp2", (2, 4), {"kv_split": "position"})),
        *exhaustive(("pp2tp4:dp2sp4", (2, 2), {"kv_split": "position"})),
        *thorough(("tp4:pp4", (1, 1), {"kv_split": "replicate"})),
    ],
)
def test_tokens_of_phases_that_split_positions_differently(phases, ways, options):
    """Over several switches; nothing is compiled after the start."""
    if phases == "dp2tp4:sp4tp2":
        options = options | {"devices": 8}
    directory, config, tensors = checkpoint(**TWO_HEADS, num_hidden_layers=4)
    built = build_tiny(directory, phases=phases, **SIZES, **options)
    first, last = built.runners[0], built.runners[-1]
    assert (first.step.layout.position_ways, last.step.layout.position_ways) == ways
    assert first.step.block_size == last.step.block_size == 4 * max(ways)
    counter, prompts = CompileCounter(), crowd(1, 12)
    counter.start()
    events = run(built.engine, prompts, [GREEDY] * len(prompts))
    counter.stop()
    for place, prompt in enumerate(prompts):
        assert tokens(events[place, 0]) == numpy_llama.greedy(config, tensors, prompt, 8)
    stats = built.engine.stats()
    assert counter.count == 0 and stats.num_failed_steps == 0
    assert stats.find(ReshardingState).num_switches >= 3
    assert stats.find(HostStats).num_restored_bytes > 0


@pytest.mark.costs(25)
@pytest.mark.parametrize("phases", ["tp2:pp2", *thorough("pp2tp2:sp2tp2")])
def test_latents_are_handed_over_in_parts(phases):
    data = np.load(PARITY / "deepseek_v3" / "expected.npz")
    prompts, wanted = (
        [data[f"{what}_{i}"].tolist() for i in range(2)] for what in ("token_ids", "greedy")
    )
    sizes = {"max_model_len": 128, "host_memory": "200KB", "num_blocks": 60}
    built = build_tiny(PARITY / "deepseek_v3", phases=phases, kv_split="position", **sizes)
    ways = [runner.step.layout.position_ways for runner in built.runners]
    assert max(ways) > 1 and len({runner.step.block_size for runner in built.runners}) == 1
    greedy = [
        SamplingParams(temperature=0, max_tokens=len(each), ignore_eos=True) for each in wanted
    ]
    for _ in range(2):
        events = run(built.engine, prompts, greedy)
        assert [tokens(events[i, 0]) for i in range(2)] == wanted
    assert built.engine.stats().find(ReshardingState).num_switches == 3
