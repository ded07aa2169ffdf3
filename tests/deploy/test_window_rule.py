"""Where KV blocks behind windows are freed, and what it changes in numbers."""

import logging
from dataclasses import replace

import pytest

from shiftjax.arch.config import LayerKind
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.deploy.window_rule import freed_in_words
from shiftjax.phases.configurations import resolve_phases

H200 = Devices(8, 141 << 30, 140 << 30)
OSS, SCOUT = PRESETS["gpt-oss-120b"], PRESETS["llama-4-scout"]
LONG = {"max_model_len": 131_072}


def resolved(model=OSS, controls=None, **given) -> Deployment:
    config = EngineConfig.from_options(**(LONG | given), controls=controls or {})
    return resolve(config, model, H200)


def test_a_long_sequence_keeps_what_the_table_says():
    words = {
        "llama-4-scout": "131,072 tokens keep 7.7 GB on all devices, of 25.8",
        "gpt-oss-120b": "131,072 tokens keep 4.8 GB on all devices, of 9.7",
        "gemma-3-27b": "131,072 tokens keep 11.2 GB on all devices, of 66.6",
    }
    for name, begin in words.items():
        found = freed_in_words(resolved(PRESETS[name], sp=8, tp=1))
        assert found == f"{begin}: blocks behind windows are freed"
    assert freed_in_words(resolved(PRESETS["llama-8b"])) == ""


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (PRESETS["llama-8b"], {}),
        (SCOUT, {"max_model_len": 8192}),  # as long as a chunk
        (OSS, {"controls": {"frees_blocks": False}}),
    ],
)
def test_one_group_has_blocks_of_all_layers(model, given, caplog):
    caplog.set_level(logging.INFO)
    deployment = resolved(model, **given)
    assert deployment.windows == (None,) and deployment.budgets.windows == ()
    assert not deployment.layout.model.frees_blocks and "behind" not in caplog.text
    assert replace(deployment, num_blocks=11).limits.num_kv_tokens == 160
    assert replace(deployment, num_blocks=11).num_kv_tokens == 160


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"fleet": True, "tp": 2}, "moves of a fleet carry whole blocks"),
        ({"pp": 2}, "the stages of a pipeline have other windows"),
    ],
)
def test_who_cannot_free_blocks_says_so(given, reason, caplog):
    caplog.set_level(logging.INFO)
    assert resolved(**given).windows == (None,)
    assert caplog.text.count(f"behind the windows of {OSS.name} are kept: {reason}") == 1


def test_phases_keep_blocks(caplog):
    caplog.set_level(logging.INFO)
    config = EngineConfig.from_options(phases="pp8:tp8", host_memory="8GiB", **LONG)
    found = resolve_phases(config, OSS, H200)
    assert {deployment.windows for deployment in found.values()} == {(None,)}
    assert "are kept: phases exchange whole blocks" in caplog.text


def test_layers_that_keep_other_things_keep_blocks(caplog):
    caplog.set_level(logging.INFO)
    kinds = LayerKind(128, 1e4), LayerKind(None, 1e4, heads=(4, 128))
    assert resolved(replace(OSS, layer_kinds=kinds)).windows == (None,)
    assert "its layers differ in what they keep of a token" in caplog.text


def test_a_block_is_of_one_group_and_there_are_more_of_them():
    freed, kept = resolved(sp=8, tp=1), resolved(sp=8, tp=1, controls={"frees_blocks": False})
    assert freed.windows == (None, 128) and 2 * freed.block_bytes == kept.block_bytes
    memory = freed.memory(H200)
    of_kept = kept.memory(H200)
    assert memory.kv_bytes == of_kept.kv_bytes
    assert 1.98 < memory.num_kv_tokens / of_kept.num_kv_tokens < 2
    assert freed.fitting_blocks(memory) // 2 == kept.fitting_blocks(of_kept)


def test_a_number_of_blocks_holds_as_many_tokens_as_before():
    freed = resolved(sp=8, tp=1, num_blocks=8193)
    assert freed.budgets.num_whole_blocks == 8193
    assert freed.num_blocks == 1 + 2 * 8192 and freed.limits.num_kv_tokens >= 131_072
    longest = freed.longest_sequence(freed.num_blocks - 1)
    assert freed.blocks_of(longest, freed.max_num_batched_tokens) <= freed.num_blocks - 1
    memory = freed.memory(H200)
    assert freed.kv_tokens_of(memory, 128) < freed.kv_tokens_of(memory, 131_072)
