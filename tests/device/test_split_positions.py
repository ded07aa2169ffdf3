"""Devices that would have copies of KV heads split positions: the same tokens in fewer bytes."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import RandomPolicy, checkpoint, crowd, make, run, scaled_checkpoint, tokens
from oracle import numpy_fp8, numpy_llama
from spent import exhaustive, thorough

from shiftjax.build import Built
from shiftjax.core.cache_events import CacheFeed, Stored
from shiftjax.core.request import SamplingParams
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.device.programs import CompileCounter
from shiftjax.drafts.speculation import DraftStats
from shiftjax.host_tier.extents import HostBlocks
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.parallel.grid import Mode

PARITY = Path(__file__).parent.parent / "data" / "parity"
TWO_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def split(directory: Path, sp: int, tp: int, *, controls: Any = None, **options) -> Built:
    """An engine whose pools hold NaN wherever nothing was written.

    In SHIFT rows exchange normalisers alone where they can, and in other modes queries and parts.
    """
    options = {
        "kv_split": "position",
        "controls": {"normalisers": True} | (controls or {}),
    } | options
    built = make(directory, sp, tp, None, **options)
    for runner in built.runners:
        for program in runner.programs:
            for mode in runner.step.weights.modes:
                runner.compiled(program, mode)  # a random policy chooses any
        if jnp.issubdtype(runner.memory.pools[0][0].dtype, jnp.floating):
            runner.memory.pools = jax.tree.map(
                lambda x: jnp.full_like(x, jnp.nan), runner.memory.pools
            )
    return built


def answers(built: Built, prompts: list[list[int]], seed: int = 0) -> list[list[int]]:
    built.engine.policy = RandomPolicy(seed)
    events = run(built.engine, prompts, [GREEDY] * len(prompts))
    return [tokens(events[i, 0]) for i in range(len(prompts))]


def expected(config, tensors, prompts: list[list[int]]) -> list[list[int]]:
    return [numpy_llama.greedy(config, tensors, prompt, 12) for prompt in prompts]


def pool_bytes(built: Built) -> set[int]:
    """Bytes of the pools on each device."""
    found: Counter[int] = Counter()
    for runner in built.runners:
        for array in jax.tree.leaves(runner.memory.pools):
            for shard in array.addressable_shards:
                found[shard.device.id] += shard.data.nbytes
    return set(found.values())


def check_views(runner: Any) -> None:
    """q and o in SHIFT are of the heads of all neighbours, in the memory of what is stored."""
    step, memory = runner.step, runner.memory
    layout, size = step.layout, (8, 8)
    stored, wide = (
        memory.params(mode, step.use_in(mode, size)) for mode in (layout.base, layout.shift)
    )
    num_views = 0
    for weight, whole, part in zip(step.model.declared, stored, wide, strict=True):
        if weight.split != "heads":
            continue
        shards = {shard.device: shard.data for shard in whole.addressable_shards}
        for shard in part.addressable_shards:
            assert len(shard.data) == layout.heads_per_device * layout.position_ways
            owner = shards[shard.device]
            offset = shard.data.unsafe_buffer_pointer() - owner.unsafe_buffer_pointer()
            assert 0 <= offset <= owner.nbytes - shard.data.nbytes, weight.name
            num_views += 1
    assert num_views == 2 * layout.model.num_layers * layout.num_devices


@pytest.mark.costs(20)
@pytest.mark.parametrize(
    ("sp", "tp", "ways", "num_blocks", "normalisers"),
    [
        (2, 2, 2, 22, True),
        *thorough((8, 1, 4, 14, True), (1, 8, 4, 14, False)),
        *exhaustive(
            (2, 2, 2, 22, False), (4, 2, 4, 14, True), (8, 1, 2, 22, True), (6, 1, 3, 17, True)
        ),
    ],
)
def test_greedy_tokens_are_the_oracle_s_in_random_modes(sp, tp, ways, num_blocks, normalisers):
    """With chunks, prefixes that are found and preemption; no switch compiles or takes memory.

    Rows exchange `normalisers` alone in SHIFT, or queries and parts.
    """
    heads = {"num_attention_heads": 16, "num_key_value_heads": sp * tp // ways}
    directory, config, tensors = checkpoint(**TWO_HEADS | (heads if ways == 2 and sp == 8 else {}))
    options = {"num_blocks": num_blocks, "token_buckets": [8, 32], "max_model_len": 90}
    built = split(directory, sp, tp, controls={"normalisers": normalisers}, **options)
    (runner,) = built.runners
    assert runner.step.layout.position_ways == ways and runner.step.block_size == 4 * ways
    uses = {runner.step.use_in(runner.step.layout.shift, (size, size)).queries for size in (8, 32)}
    assert uses == {Mode(sp, ways) if normalisers else None}
    if normalisers:
        check_views(runner)
    counter, bytes_before = CompileCounter(), pool_bytes(built)
    feed = CacheFeed([lane.scheduler.tables.device for lane in built.engine.lanes])
    counter.start()
    prompts = crowd(3)
    for seed in (0, 1):
        assert answers(built, prompts, seed) == expected(config, tensors, prompts)
    longest = [max(prompts, key=len)]
    assert len(longest[0]) > 4 * ways  # whose first block is found
    assert answers(built, longest) == answers(built, longest) == expected(config, tensors, longest)
    counter.stop()
    stats = built.engine.stats()
    assert stats.num_preemptions["recompute"] > 0 and stats.num_prefix_hit_tokens > 0
    assert all(stats.steps_by_mode[mode.label] > 0 for mode in runner.step.layout.modes)
    assert counter.count == 0 and pool_bytes(built) == bytes_before
    told = [event for batch in feed.take()[0] for event in batch.events]
    stored = [event for event in told if isinstance(event, Stored)]
    assert stored and {event.block_size for event in stored} == {4 * ways}  # stripes
    assert all(len(event.token_ids) == 4 * ways * len(event.hashes) for event in stored)


@pytest.mark.costs(12)
def test_a_device_holds_its_part_of_a_block_and_no_more():
    directory, *_ = checkpoint(**TWO_HEADS)
    own = {"policy": "cost", "machine": "h200x8", "controls": {"normalisers": None}}
    whole, parts = (split(directory, 2, 2, kv_split=by, **own) for by in ("replicate", "position"))
    assert whole.rows == {}
    assert [name[:6] for name in parts.rows] == ["shift,"]
    assert all(what.startswith("normalisers alone (") for what in parts.rows.values())
    deployments = whole.deployment, parts.deployment
    each = [kv_token_bytes(it.layout, it.formats) for it in deployments]
    held = [it.num_blocks * it.block_size for it in deployments]
    assert each == [2 * each[1], each[1]] and held == [held[0], 2 * held[0]]
    assert [pool_bytes(built) for built in (whole, parts)] == [
        {num * size} for num, size in zip(held, each, strict=True)
    ]
    assert [it.num_blocks * it.block_bytes for it in deployments] == [held[0] * each[0]] * 2


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    ("name", "sp", "tp"),
    [
        ("gpt_oss", 4, 1),  # sinks, and windows of which one is freed
        ("deepseek_v3", 2, 2),  # a latent, which all devices split
        *exhaustive(("deepseek_v2", 1, 4)),
        *thorough(("gemma2", 2, 2)),  # soft caps, and windows
        *thorough(("llama4_chunks", 2, 2)),
        *exhaustive(("mistral", 2, 2)),
    ],
)
def test_windows_sinks_soft_caps_and_latents(name, sp, tp):
    found = np.load(PARITY / name / "expected.npz")
    prompts, greedy = (
        [found[f"{what}_{i}"].tolist() for i in (0, 1)] for what in ("token_ids", "greedy")
    )
    longest = max(map(len, prompts)) + 40
    sizes = {"max_model_len": longest, "max_num_batched_tokens": 64, "token_buckets": [64]}
    built = split(PARITY / name, sp, tp, max_num_seqs=4, **sizes)
    assert built.deployment.layout.position_ways > 1
    got = answers(built, prompts)
    assert [each[: len(one)] for each, one in zip(got, greedy, strict=True)] == [
        one[:12] for one in greedy
    ]


@pytest.mark.costs(12)
def test_codes_are_exchanged_as_codes():
    directory, config, tensors = scaled_checkpoint(**TWO_HEADS)
    prompts = crowd(3, count=4)
    with numpy_fp8.cached():
        wanted = expected(config, tensors, prompts)
    built = split(directory, 2, 2, kv_cache_dtype="fp8")
    assert answers(built, prompts) == wanted
    (runner,) = built.runners
    assert {array.dtype.itemsize for array in jax.tree.leaves(runner.memory.pools)} == {1}


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    "more",
    [
        {"speculation": "ngram", "controls": {"fixed_drafts": True}},
        *thorough(
            {"speculation": "suffix", "controls": {"fixed_drafts": True, "max_draft_rows": 24}}
        ),
    ],
)
def test_drafts_are_rows_that_see_less_of_a_context(more):
    directory, config, tensors = checkpoint(**TWO_HEADS)
    prompts = [[*prompt, *prompt] for prompt in crowd(3, count=5)]
    built = split(directory, 2, 2, **more)
    for seed in (0, 1):
        assert answers(built, prompts, seed) == expected(config, tensors, prompts)
    stats = built.engine.stats().find(DraftStats)
    assert stats is not None and stats.num_accepted > 0


@pytest.mark.costs(12)
@pytest.mark.parametrize(
    ("model", "degrees", "more"),
    [
        (
            {"model_type": "llama_swiftkv", "num_hidden_layers": 3, "num_key_value_layers": 1},
            (2, 2),
            {},
        ),
        *thorough(({"num_hidden_layers": 3}, (2, 2), {"pp": 2})),
    ],
    ids=["late layers", "stages"],
)
def test_layers_of_rows_alone_and_stages(model, degrees, more):
    directory, config, tensors = checkpoint(**(TWO_HEADS | model))
    prompts = crowd(3, count=5)
    built = split(directory, *degrees, **more)
    assert all(runner.step.attention.localise for runner in built.runners)
    assert answers(built, prompts) == expected(config, tensors, prompts)


@pytest.mark.costs(20)
@pytest.mark.parametrize(("sp", "tp", "num_blocks"), [(2, 2, 22), *thorough((4, 2, 14))])
def test_runs_of_stripes_are_swapped_out_and_found_again_on_the_host(sp, tp, num_blocks):
    """In random modes, with extents of one budget to the byte; nothing is compiled by it."""
    directory, config, tensors = checkpoint(**TWO_HEADS)
    sizes = {"num_blocks": num_blocks, "max_model_len": 90, "token_buckets": [8, 32]}
    built = split(directory, sp, tp, preemption="swap", host_memory="400KB", **sizes)
    counter, bytes_before = CompileCounter(), pool_bytes(built)
    counter.start()
    for seed in (0, 1, 2, 0):
        prompts = crowd(seed)
        assert answers(built, prompts, seed) == expected(config, tensors, prompts)
    counter.stop()
    stats, (runner,) = built.engine.stats(), built.runners
    host = stats.find(HostStats)
    assert stats.num_preemptions["swap"] > 0 and host.num_hit_tokens > 0
    assert counter.count == 0 and pool_bytes(built) == bytes_before
    memory, extents = (
        built.engine.lanes[0].scheduler.tables.tier.memory,
        runner.memory.host._extents,
    )
    held = {n: sum(part.array.nbytes for part in parts) for n, parts in extents.items()}
    alive = {extent.number for extent in memory.extents}
    assert sum(held[number] for number in alive) == memory.num_used_bytes <= 400_000
    token = kv_token_bytes(built.deployment.layout, built.deployment.formats)
    assert built.deployment.host_block_bytes == token * sp * tp * built.deployment.block_size


@pytest.mark.costs(15)
def test_copies_and_parts_of_positions_read_each_other_s_prefixes():
    """Blocks of equally many tokens, over one host tier."""
    directory, config, tensors = checkpoint(**TWO_HEADS)
    sizes = {"max_model_len": 100, "num_blocks": 17, "max_num_seqs": 2, "host_memory": "4MB"}
    engines = [
        split(directory, 2, 2, block_size=4, **sizes),  # 2 ways
        split(directory, 2, 4, block_size=2, **sizes),  # 4 ways
        split(directory, 1, 1, block_size=8, **sizes),
    ]
    memory = engines[0].engine.lanes[0].scheduler.tables.tier.memory
    for built in engines[1:]:
        each = built.deployment.block_size, built.deployment.host_block_bytes
        built.engine.lanes[0].scheduler.tables.tier = HostBlocks(memory, *each)
        built.runners[0].memory.host._extents = engines[0].runners[0].memory.host._extents
    prompts = [[(7 * i + 31 * stem) % 190 + 3 for i in range(60)] for stem in range(4)]
    wanted = expected(config, tensors, prompts)
    for writer, built in enumerate(engines):
        engines[0].engine.flush_prefix_cache()
        for other in engines:
            other.engine.lanes[0].scheduler.tables.device.clear_cache()
        for prompt, want in zip(prompts, wanted, strict=True):
            assert answers(built, [prompt]) == [want]  # the first ones go to the host
        for reader, other in enumerate(engines):
            if reader != writer:
                events = run(other.engine, prompts[:1], [GREEDY])
                assert tokens(events[0, 0]) == wanted[0]
                assert events[0, 0][-1].metrics.num_cached_tokens == 56
