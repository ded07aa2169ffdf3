"""Engines of different layouts over one host tier: each goes on with what others computed."""

import numpy as np
import pytest
from echo_pools import Told
from engines import checkpoint, make, run, tokens
from oracle import numpy_llama

from shiftjax.build import Built
from shiftjax.core.request import SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.host_tier.extents import HostBlocks
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.parallel.arrangements import equal_groups

PROMPTS = [[(7 * i + 31 * stem) % 190 + 3 for i in range(60)] for stem in range(6)]
NUM_CACHED = 56  # never the last token, and whole blocks
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SIZES = {"max_model_len": 100, "num_blocks": 36, "max_num_seqs": 4, "token_buckets": [32]}


@pytest.fixture(scope="module")
def engines() -> tuple[Built, Built]:
    """Stages of uneven layers, and 4 devices that share a head; on the devices fit two prompts."""
    directory, *_ = checkpoint(num_hidden_layers=3)
    staged = make(directory, 1, 1, pp=2, host_memory="4MB", **SIZES)
    split = make(directory, 2, 2, host_memory="4MB", policy="base", **SIZES)
    memory = staged.engine.lanes[0].scheduler.tables.tier.memory
    sizes = split.deployment.block_size, split.deployment.host_block_bytes
    split.engine.lanes[0].scheduler.tables.tier = HostBlocks(memory, *sizes)
    split.runners[0].memory.host._extents = staged.runners[0].memory.host._extents
    return staged, split


def serve(built: Built, *stems: int) -> list[int]:
    """Serve prompts together, and compare with the oracle: their cached tokens."""
    _, config, tensors = checkpoint(num_hidden_layers=3)
    events = run(built.engine, [PROMPTS[stem] for stem in stems], [GREEDY] * len(stems))
    for place, stem in enumerate(stems):
        expected = numpy_llama.greedy(config, tensors, PROMPTS[stem], 4)
        assert tokens(events[place, 0]) == expected
    return [events[place, 0][-1].metrics.num_cached_tokens for place in range(len(stems))]


def forget(built: Built) -> None:
    """Empty the prefix cache of the devices alone."""
    for lane in built.engine.lanes:
        lane.scheduler.tables.device.clear_cache()


def cached_blocks(built: Built) -> dict[bytes, np.ndarray]:
    """What the devices have of blocks that are found by their hash, in all layers."""
    found = built.engine.lanes[0].scheduler.tables.device._index
    pools = [array for runner in built.runners for pair in runner.memory.pools for array in pair]
    values = [np.asarray(array) for array in pools]
    return {key: np.concatenate([v[block] for v in values]) for key, block in found.items()}


@pytest.mark.costs(12)
@pytest.mark.parametrize("writer", [0, 1])
def test_one_goes_on_with_what_another_layout_has_computed(engines, writer):
    """The same tokens as the oracle's; blocks are those that it would compute, but for rounding."""
    one, other = engines[writer], engines[1 - writer]
    counter = CompileCounter()
    counter.start()
    one.engine.flush_prefix_cache()
    forget(other)
    assert [serve(one, stem) for stem in (0, 1, 2, 3)] == [[0]] * 4  # 0 and 1 go to the host
    assert serve(other, 0) == [NUM_CACHED]
    restored = cached_blocks(other)
    other.engine.flush_prefix_cache()
    assert serve(other, 0) == [0]
    computed = cached_blocks(other)
    assert counter.stop() is None and counter.count == 0
    assert len(restored) == len(computed) >= NUM_CACHED // 4
    for key, values in computed.items():
        np.testing.assert_allclose(restored[key], values, rtol=0, atol=2e-5)
        assert np.abs(values).max() > 0.1


@pytest.mark.parametrize("writer", [0, 1])
def test_what_another_layout_has_written_is_prefetched_for_those_who_wait(engines, writer):
    one, other = engines[writer], engines[1 - writer]
    one.engine.flush_prefix_cache()
    forget(other)
    for stem in (0, 1, 2, 3, 4, 5):
        serve(one, stem)
    before = other.engine.stats().find(HostStats)
    assert serve(other, 0, 1, 2) == [NUM_CACHED] * 3
    after = other.engine.stats().find(HostStats)
    assert after.num_prefetch_hits > before.num_prefetch_hits
    assert other.engine.stats().num_failed_steps == 0


def test_a_copy_of_another_layout_that_is_lost_ends_who_reads_it(engines):
    one, other = engines
    one.engine.flush_prefix_cache()
    forget(other)
    for stem in (0, 1, 2, 3):
        serve(one, stem)
    for parts in one.runners[0].memory.host._extents.values():
        parts[-1].array.delete()
    events = run(other.engine, [PROMPTS[0]], [GREEDY])
    assert events[0, 0][-1].error_code == "step_failed"
    one.engine.flush_prefix_cache()
    assert serve(other, 0) + serve(other, 0) == [0, NUM_CACHED]


@pytest.mark.costs(14)
def test_every_width_of_a_fleet_reads_what_others_have_left_on_the_host():
    """From units of one device to a group of four, which splits positions, and back."""
    directory, config, tensors = checkpoint(num_hidden_layers=1, num_key_value_heads=1)
    sizes = {**SIZES, "num_blocks": 24, "max_num_seqs": 2, "host_memory": "4MB"}
    sizes |= {"devices": 4, "fleet_widths": (1, 4), "kv_split": "position"}
    built = make(directory, None, 1, fleet=True, **sizes)
    fleet, policy, counter = built.engine.topology.find(Fleet), Told(), CompileCounter()
    fleet.policy = policy
    lanes, found = list(fleet.lanes.values()), []
    counter.start()
    for width in (1, 4, 1):
        policy.wishes = [Wish(equal_groups(4, width), "told", "move")]
        # More than one group has room for: what comes first makes room for the rest.
        for stem in [*range(6)] * 4 if width == 1 else range(6):
            prompt = PROMPTS[stem] if width == 1 else PROMPTS[stem][:41]
            events = run(built.engine, [prompt], [GREEDY])
            assert tokens(events[0, 0]) == numpy_llama.greedy(config, tensors, prompt, 4)
            built.engine.check()
        found.append(sum(lane.scheduler.tables.tier._num_hit_tokens for lane in lanes))
    counter.stop()
    assert counter.count == 0
    assert found[1] - found[0] >= 6 * 32 and found[2] > found[1]
