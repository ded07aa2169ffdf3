"""Where devices split positions, and what it changes in numbers."""

import logging
from dataclasses import replace

import pytest

from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.costs.memory import split_bytes
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.options import ConfigError

LLAMA = PRESETS["llama-8b"]  # 8 KV heads
FEW = replace(LLAMA, num_kv_heads=2)
GB = 1 << 30
CPUS = Devices(8, 32 * GB, 32 * GB, has_kernels=False)


def resolved(model=FEW, devices=CPUS, **given) -> Deployment:
    config = EngineConfig.from_options(**({"sp": 4, "tp": 2, "dtype": "bfloat16"} | given))
    return resolve(config, model, devices)


def test_a_block_is_as_large_on_a_device_and_holds_more_tokens():
    whole, split = (resolved(kv_split=by) for by in ("replicate", "position"))
    assert (whole.block_size, split.block_size) == (16, 64)
    assert whole.block_bytes == split.block_bytes
    assert whole.host_block_bytes == split.host_block_bytes  # of 4 times as many tokens
    memories = whole.memory(CPUS), split.memory(CPUS)
    assert memories[0].kv_token_bytes == 4 * memories[1].kv_token_bytes
    buffer = split_bytes(split.layout, split.formats, split.max_num_batched_tokens)
    kv_bytes = memories[0].kv_bytes - buffer  # of what prompts see
    assert buffer > 0 and memories[1].kv_bytes == kv_bytes
    assert memories[1].num_kv_tokens >= 4 * (kv_bytes // memories[0].kv_token_bytes)
    assert split.stages[0].layout.position_ways == 4
    assert split.of_width(4).block_size == 64


@pytest.mark.parametrize(
    ("devices", "given", "splits"),
    [
        (CPUS, {}, False),  # copies hold the longest context
        (CPUS._replace(total_bytes=4 * GB, free_bytes=4 * GB), {}, True),
        (CPUS._replace(total_bytes=2 * GB, free_bytes=2 * GB), {}, False),  # neither does
        (CPUS._replace(total_bytes=4 * GB, free_bytes=4 * GB), {"host_memory": "1GiB"}, True),
        (CPUS._replace(total_bytes=4 * GB, free_bytes=4 * GB, has_kernels=True), {}, True),
    ],
)
def test_auto_splits_what_copies_would_not_hold(devices, given, splits):
    sizes = {"sp": 1, "tp": 8, "max_model_len": 131_072, "max_num_seqs": 1}
    deployment = resolved(devices=devices, **sizes, **given)
    assert deployment.layout.by_position is splits


@pytest.mark.parametrize(
    ("given", "splits"),
    [
        ({}, True),
        ({"kv_split": "replicate"}, False),
        ({"host_memory": "1GiB"}, True),
        ({"hosts": 2, "coordinator": "a:5", "host_secret_file": "secret"}, True),
    ],
)
def test_latents_split_on_gpus_too(given, splits):
    gpus = CPUS._replace(total_bytes=140 * GB, free_bytes=140 * GB, has_kernels=True)
    assert resolved(PRESETS["deepseek-v2-lite"], gpus, **given).layout.by_position is splits


FLEET = {"sp": None, "fleet": True, "kv_split": "position"}


@pytest.mark.parametrize(
    ("tp", "sizes", "ways"),
    [
        (1, {1: 16, 2: 32, 4: 64, 8: 128}, {1: 1, 2: 1, 4: 2, 8: 4}),
        (4, {1: 32, 2: 64}, {1: 2, 2: 4}),  # a unit's devices have copies, too
    ],
)
def test_blocks_of_a_fleet_hold_more_tokens_in_every_wider_group(tp, sizes, ways):
    """Copies' stop growing where heads are split; on a device all have as many bytes."""
    whole, split = (
        resolved(tp=tp, **(FLEET | {"kv_split": by})) for by in ("replicate", "position")
    )
    groups = split.by_width
    assert {width: each.block_size for width, each in groups.items()} == sizes
    assert {width: each.layout.position_ways for width, each in groups.items()} == ways
    assert {each.block_bytes for each in groups.values()} == {whole.block_bytes}
    assert {each.host_block_bytes // width for width, each in groups.items()} == {
        whole.block_bytes * tp
    }
    assert {each.hash_size for each in groups.values()} == {min(sizes.values())}
    widest = split.of_width(max(sizes)), whole.of_width(max(sizes))
    each = [it.memory(CPUS).kv_token_bytes for it in widest]
    assert each[1] == max(ways.values()) * each[0]
    limits = [replace(each, num_blocks=100).limits.num_kv_tokens for each in (split, whole)]
    assert limits == [99 * each.block_size for each in widest]


def test_a_fleet_of_latents_splits_them():
    fleet = resolved(PRESETS["deepseek-v2-lite"], **FLEET | {"tp": 1, "kv_split": "auto"})
    assert [each.layout.position_ways for each in fleet.by_width.values()] == [1, 2, 4, 8]


def test_the_widest_group_of_a_fleet_has_to_hold_a_sequence():
    sizes = {"tp": 1, "num_blocks": 11}
    assert resolved(**FLEET, **sizes, max_model_len=1280).num_blocks == 11
    with pytest.raises(ConfigError, match="num_blocks = 11 blocks of 128 tokens hold 1280 tokens"):
        resolved(**FLEET, **sizes, max_model_len=1281)


def test_who_has_no_copies_is_told_that_nothing_changes(caplog):
    assert not resolved(LLAMA, kv_split="position").layout.by_position
    assert "kv_split = position changes nothing" in caplog.text


def test_the_start_says_how_long_a_block_is(caplog):
    caplog.set_level(logging.INFO)
    resolved(kv_split="position")
    assert "4 devices split the positions" in caplog.text
    assert "KV blocks of 64 tokens, 16 on each" in caplog.text


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (
            PRESETS["gemma-4-31b"],
            {"sp": 8, "tp": 1},
            "has layers that differ in how many devices cache the same: use replicate",
        ),
        (
            FEW,
            {"num_blocks": 5, "max_model_len": 300},
            "num_blocks = 5 blocks of 64 tokens hold 256 tokens",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(model, given, words):
    with pytest.raises(ConfigError, match=words):
        resolved(model, kv_split="position", **given)
