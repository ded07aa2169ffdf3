"""Blocks by cache group on devices: tokens are the same as where every block is kept."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from engines import RandomPolicy, make, run, tokens
from spent import exhaustive, thorough

from shiftjax.arch.cache import first_block
from shiftjax.build import Built
from shiftjax.core.request import Request, SamplingParams
from shiftjax.core.windowed_tables import WindowedTables
from shiftjax.drafts.speculation import DraftStats

PARITY = Path(__file__).parent.parent / "data" / "parity"
CHUNKS = "llama4_chunks"  # chunks of 64 in every other layer
FIXED_DRAFTS = {"fixed_drafts": True}
KEPT = {"controls": {"frees_blocks": False}}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZES = {"max_model_len": 820, "num_blocks": 208, "max_num_batched_tokens": 64}
SIZES |= {"token_buckets": [64], "max_num_seqs": 4}


def expected_of(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the greedy tokens of transformers."""
    expected = np.load(PARITY / name / "expected.npz")
    prompts, greedy = (
        [expected[f"{what}_{i}"].tolist() for i in (0, 1)] for what in ("token_ids", "greedy")
    )
    return prompts, greedy


def tables_of(built: Built) -> WindowedTables:
    tables = built.engine.lanes[0].scheduler.tables
    assert isinstance(tables, WindowedTables)
    return tables


def answers(built: Built, prompts: list[list[int]], sampling=GREEDY) -> list[list[int]]:
    events = run(built.engine, prompts, [sampling] * len(prompts))
    return [tokens(events[i, 0]) for i in range(len(prompts))]


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    ("name", "sp", "tp"),
    [
        (CHUNKS, 2, 2),
        *exhaustive((CHUNKS, 1, 4)),
        *exhaustive(("llama4_chunks_128e", 1, 4)),  # four groups of one layer
        *thorough(("gpt_oss_mxfp4", 2, 2)),
        *exhaustive(("gpt_oss", 1, 4)),
        *thorough(("gemma3_text", 1, 4)),
        *thorough(("mistral", 2, 2)),  # one group, whose blocks are freed, too
    ],
)
def test_tokens_are_those_of_transformers_under_random_modes(name, sp, tp):
    prompts, greedy = expected_of(name)
    sizes = SIZES if "chunks" in name else SIZES | {"max_model_len": 128, "num_blocks": 100}
    built = make(PARITY / name, sp, tp, **sizes)
    built.engine.policy = RandomPolicy(5)
    assert tables_of(built) and answers(built, prompts) == greedy


@cache
def engine(**more) -> Built:
    return make(PARITY / CHUNKS, 1, 1, **(SIZES | more))


@cache
def kept_answers(lengths: tuple[int, ...], max_tokens: int = 40) -> list[list[int]]:
    """Of an engine that keeps all blocks, one prompt at a time."""
    built, sampling = _keeping(), replace(LONG, max_tokens=max_tokens)
    return [answers(built, [prompt], sampling)[0] for prompt in crowd_of(1, lengths)]


@cache
def _keeping() -> Built:
    built = make(PARITY / CHUNKS, 1, 1, **SIZES, **KEPT)
    assert not isinstance(built.engine.lanes[0].scheduler.tables, WindowedTables)
    return built


LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def crowd_of(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 190, length).tolist() for length in lengths]


@pytest.mark.costs(12)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_is_preempted_goes_on_with_the_same_tokens(preemption):
    more = {"preemption": preemption, "max_model_len": 200, "num_blocks": 84}
    if preemption == "swap":
        more["host_memory"] = "4MB"
    prompts, sampling = crowd_of(1, (90, 80, 70, 60)), replace(LONG, max_tokens=100)
    built = engine(**more)
    assert answers(built, prompts, sampling) == kept_answers((90, 80, 70, 60), 100)
    assert built.engine.stats().num_preemptions[preemption] > 0


@pytest.mark.costs(8)
def test_prefixes_are_found_as_far_as_windows_are_there():
    built, (prompt,), (expected,) = engine(), crowd_of(1, (300,)), kept_answers((300,))
    tables = tables_of(built)

    def cached() -> int:
        (events,) = run(built.engine, [prompt], [LONG]).values()
        assert tokens(events) == expected
        return events[-1].metrics.num_cached_tokens

    tables.clear_cache()
    assert cached() == 0
    assert cached() == 296  # with the part of a chunk that 296 sees: blocks 64 to 73
    device = tables.device
    (last,) = [b for key, b in device._index.items() if _number(device, key, prompt) == (1, 70)]
    device._free.append(last)  # as if others had needed it
    del device._cached[last]
    device._forget(last)
    assert cached() == 280  # of the chunk from 256 on, blocks 64 to 69
    (first,) = [b for key, b in device._index.items() if _number(device, key, prompt) == (1, 64)]
    device._free.append(first)
    del device._cached[first]
    device._forget(first)
    assert cached() == 256  # a chunk that begins needs none


def _number(device, key: bytes, prompt: list[int]) -> tuple[int, int]:
    """The group and the number of a cached block of a prompt; the number is -1 of other tokens."""
    contents = device._contents[device._index[key]]
    starts = range(0, len(prompt) - 3, 4)
    found = [n for n, at in enumerate(starts) if prompt[at : at + 4] == contents.tokens]
    return len(key) - 16, found[0] if len(found) == 1 else -1


@pytest.mark.costs(8)
def test_drafts_that_are_wrong_lose_nothing():
    built = make(PARITY / CHUNKS, 1, 1, **SIZES, speculation="suffix", controls=FIXED_DRAFTS)
    prompts = [(prompt * 9)[:200] for prompt in crowd_of(2, (50, 30))]
    assert answers(built, prompts, LONG) == answers(_keeping(), prompts, LONG)
    stats = built.engine.stats().find(DraftStats)
    assert stats is not None and sum(stats.steps.values()) > 0


@pytest.mark.costs(6)
def test_nothing_of_the_null_block_is_seen():
    """A freed place is the null block, and a tile reads the blocks before its chunk, too."""
    built, expected = engine(), kept_answers((300,))
    tables_of(built).clear_cache()
    memory = built.runners[0].memory
    for prompt, answer in zip(crowd_of(1, (300,)), expected, strict=True):
        blocks = tables_of(built).device.num_blocks
        memory.pools = [
            tuple(array.at[::blocks].set(jnp.nan) for array in pool) for pool in memory.pools
        ]
        assert answers(built, [prompt], LONG) == [answer]


@pytest.mark.costs(6)
def test_a_long_sequence_holds_what_the_formula_says():
    built, (prompt, _) = engine(), expected_of(CHUNKS)[0]
    tables, size = tables_of(built), built.deployment.block_size
    tables.clear_cache()
    built.engine.add_request(Request("long", prompt, LONG))
    most = 0
    while built.engine.has_work():
        built.engine.step(0.0)
        (sequence, *_) = built.engine.lanes[0].scheduler.running or [None]
        if sequence is None or not sequence.block_table:
            continue
        used, held = tables.device.num_used_blocks, -(-len(sequence.token_ids) // size)
        if sequence.num_output_tokens > 2 * size:
            first = first_block(sequence.num_verified_tokens, built.deployment.windows[1], size)
            assert abs(used - (2 * held - first)) <= 2  # the last step may not be committed
        most = max(most, used)
    (chunk,) = [window.tokens for window in built.deployment.windows if window]
    assert most <= -(-780 // size) + (chunk + 64) // size + 2
    assert 2 * len(prompt) // size > most + 100
