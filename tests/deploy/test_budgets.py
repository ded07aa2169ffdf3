"""How much goes into a step by device, and by what the settings leave open."""

import jax
import pytest

from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.deploy.budgets import OF_CPUS, OF_GPUS, OF_LARGE_GPUS, budgets_for, chosen_budgets
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.device.sizing import measure

GIB = 1 << 30


@pytest.mark.parametrize(
    ("is_cpu", "gigabytes", "budgets"),
    [
        (True, 500, OF_CPUS),
        (False, 22, OF_GPUS),
        (False, 44, OF_GPUS),  # a card of 48 GB
        (False, 60, OF_LARGE_GPUS),  # a card of 80 GB, of which JAX takes three quarters
        (False, 130, OF_LARGE_GPUS),
    ],
)
def test_a_step_suits_the_device(is_cpu, gigabytes, budgets):
    assert budgets_for(is_cpu, gigabytes * GIB) == budgets


@pytest.mark.parametrize(
    ("options", "budgets"),
    [
        ({}, (256, 8192)),
        ({"max_num_seqs": 16}, (16, 8192)),
        ({"max_num_batched_tokens": 128}, (128, 128)),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 4096}, (512, 4096)),
        ({"token_buckets": [64, 512]}, (256, 512)),
        ({"token_buckets": [64, 512], "max_num_batched_tokens": 300}, (256, 300)),
    ],
)
def test_what_is_set_counts(options, budgets):
    config = EngineConfig.from_options(**options)
    assert chosen_budgets(config, OF_LARGE_GPUS) == budgets


def test_a_step_has_a_token_for_every_sequence_that_is_asked_for():
    config = EngineConfig.from_options(max_num_seqs=4096)
    assert chosen_budgets(config, OF_GPUS) == (4096, 4096)


def test_devices_say_what_suits_them():
    assert measure(jax.devices()).budgets == OF_CPUS
    config, model = EngineConfig.from_options(sp=1, tp=1), PRESETS["tiny"]
    for budgets in (OF_CPUS, OF_LARGE_GPUS):
        found = resolve(config, model, Devices(1, 80 * GIB, 80 * GIB, budgets=budgets))
        assert (found.max_num_seqs, found.max_num_batched_tokens) == budgets
        assert found.token_buckets[-1] == budgets.max_num_batched_tokens
