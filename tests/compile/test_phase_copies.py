"""Phases of a model that one card cannot hold, for 8 cards of 24 GB on a machine without them."""

from collections.abc import Iterator
from dataclasses import replace

import aot
import pytest
from hlo import instructions, shape_bytes
from steps import device_bytes, pools_of
from test_stage_steps import LLAMA_34B

from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.device.groups import Placed, define_groups, pool_of
from shiftjax.device.pool import abstract_pools
from shiftjax.host_tier.copies_device import compile_transfers
from shiftjax.host_tier.extents import EXTENT_SIZES
from shiftjax.phases.configurations import resolve_phases
from shiftjax.phases.resharding import PHASES

aot.require()

CARDS = Devices(8, 24 * 10**9, 24 * 10**9 - 300 * 2**20)
FEW_LAYERS = 3  # stand for all
COPIES = 2  # of an extent, at most: head-major and in the order of blocks
every_phase = pytest.mark.parametrize("phase", PHASES)


@pytest.fixture(scope="module")
def placed() -> dict[str, tuple[Deployment, list[Placed]]]:
    """Both configurations, with their KV blocks; of equal stages between the ends one."""
    devices = list(aot.make_mesh("a10", (8,), ("x",)).devices.flat)
    options = {"max_model_len": 4096, "dtype": "bfloat16", "devices": 8, "host_memory": "300GiB"}
    config = EngineConfig.from_options(phases="pp8:tp8", **options)
    found = {}
    for phase, deployment in resolve_phases(config, LLAMA_34B, CARDS).items():
        sized = deployment.sized(deployment.memory(CARDS))
        groups = define_groups(sized, devices)
        found[phase] = sized, [groups[i] for i in sorted({0, len(groups) // 2, len(groups) - 1})]
    return found


@every_phase
def test_a_phase_holds_what_was_foretold_to_the_byte(placed, phase):
    """And leaves what the steps' temporaries and the copies on their way were given."""
    deployment, groups = placed[phase]
    assert len(groups) == {"prefill": 3, "decode": 1}[phase]
    for one in groups:
        step, stage = one.step, deployment.stages[one.stage]
        weights = device_bytes(step.weights.abstract(step.layout.base, step.mesh))
        pools = device_bytes(pools_of(step, pool_of(deployment)))
        memory = stage.memory(CARDS)
        assert weights == memory.weight_bytes
        assert pools == deployment.num_blocks * stage.block_bytes
        room = int(deployment.memory_fraction * CARDS.total_bytes)
        used = CARDS.total_bytes - CARDS.free_bytes + weights + pools + memory.workspace_bytes
        assert used <= room and deployment.num_blocks * deployment.block_size > 4096


@every_phase
def test_blocks_go_to_the_host_and_back_without_a_copy_of_a_pool(placed, phase):
    """Out of a stage with one device, into one of eight: what lies in between is the extent."""
    deployment, groups = placed[phase]
    step, pool = groups[len(groups) // 2].step, pool_of(deployment)
    layout = replace(step.layout, model=replace(step.layout.model, num_layers=FEW_LAYERS))
    gathers, scatters = compile_transfers(step.mesh, layout, pool)
    pools = abstract_pools(step.mesh, layout, pool.num_blocks, pool.block_size, pool.dtype)
    one, all_of_them = device_bytes(pools[0][0]), device_bytes(pools)
    for size in EXTENT_SIZES:
        extent = size * all_of_them // deployment.num_blocks
        out, back = (each[size].memory_analysis() for each in (gathers, scatters))
        assert out.output_size_in_bytes == extent
        assert out.temp_size_in_bytes <= COPIES * extent
        assert back.alias_size_in_bytes == all_of_them
        assert back.temp_size_in_bytes <= COPIES * extent
        for program in (gathers[size], scatters[size]):
            assert not list(copies_of(program.as_text(), one))


def copies_of(text: str, num_bytes: int) -> Iterator[str]:
    """Instructions that make another array of so many bytes."""
    for i in instructions(text):
        copies = i.opcode in ("copy", "copy-start", "transpose", "convert")
        if copies and shape_bytes(i.shape) == num_bytes:
            yield i.opcode
