"""Two configurations take turns on the same devices: what is held, loaded and let go of."""

import gc
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from harness import BIASED, ODD, SWIFTKV, TIED, held_bytes, silent

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats, formats_of
from shiftjax.config import EngineConfig
from shiftjax.costs.memory import weight_bytes
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.device.groups import Placed, define_groups, load_weights, pool_of
from shiftjax.device.mesh import make_mesh
from shiftjax.device.place import HostWeights, define, load, load_rows, read_rows
from shiftjax.device.programs import CompileCounter
from shiftjax.local_deployment import host_copy_bytes
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout
from shiftjax.phases.exchange_device import DeviceExchange
from shiftjax.phases.resharding import Phase
from shiftjax.weights.random import RandomSource
from shiftjax.weights.source import CheckpointError, TensorInfo

NUM_SWITCHES = 50
DEGREES: dict[Phase, dict[str, int]] = {
    "prefill": {"dp": 2, "pp": 2, "sp": 1, "tp": 1},
    "decode": {"sp": 1, "tp": 4},
}
MESHES = [(1, 1), (1, 8), (3, 2), (2, 4)]
MODELS = {"untied": ODD, "tied": TIED, "biased": BIASED, "swiftkv": SWIFTKV}


class Counted:
    """A source that counts how often a tensor is read, and whose reads fail on demand."""

    def __init__(self, config: ModelConfig, dtype: str = "float32"):
        self._source = RandomSource(config, 3, dtype)
        self.location, self.config = self._source.location, config
        self.tensors: dict[str, TensorInfo] = dict(self._source.tensors)
        self.reads: Counter[str] = Counter()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        self.reads[name] += 1
        return self._source.read(name, index)


def held(source: Counted, rows: HostWeights | None, sp: int, tp: int) -> list[jax.Array]:
    """The weights on devices, from the source or from a copy of it."""
    config = source.config
    layout, mesh = Layout(config, sp, tp), make_mesh(jax.devices()[: sp * tp], sp, tp)
    model = define(layout, formats_of("bfloat16"))
    if rows is None:
        return [each for each in load(model, layout, mesh, source, silent) if each is not None]
    return [each for each in load_rows(model, layout, mesh, rows, silent) if each is not None]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_layout_gets_out_of_one_copy_what_it_gets_from_the_file(config, stored):
    source = Counted(config, stored)
    rows = HostWeights(source, "bfloat16")
    for sp, tp in MESHES:
        got = held(source, rows, sp, tp)
        reads, expected = source.reads.copy(), held(source, None, sp, tp)
        assert set(reads.values()) == {1} and reads.keys() == source.tensors.keys()
        source.reads = reads
        for one, other in zip(got, expected, strict=True):
            assert one.sharding == other.sharding
            assert np.array_equal(np.asarray(one), np.asarray(other))
    embed = define(Layout(config, 1, 1), formats_of("bfloat16")).declared[0]
    part = read_rows(source, embed, 3, 9).astype(rows(embed, 3, 9).dtype)
    assert np.array_equal(rows(embed, 3, 9), part)
    assert rows.num_bytes == sum(np.prod(each.shape) * 2 for each in source.tensors.values())
    assert rows.num_bytes == host_copy_bytes(config, Formats("fp8"))  # codes are made of the copy


def test_shards_are_loaded_from_where_they_lie():
    """Heads and sizes that divide: where devices are the host, nothing is held but the copy."""
    config = replace(ODD, num_heads=8, num_kv_heads=4, intermediate_size=128, vocab_size=256)
    source = Counted(config)
    rows = HostWeights(source, "bfloat16")
    arrays = [array for sp, tp in [(1, 1), (1, 4), (2, 2)] for array in held(source, rows, sp, tp)]
    copies = [each.ctypes.data for each in rows._held.values()]
    copies = [(at, at + each.nbytes) for at, each in zip(copies, rows._held.values(), strict=True)]
    for shard in (shard.data for array in arrays for shard in array.addressable_shards):
        at = shard.unsafe_buffer_pointer()
        assert any(start <= at and at + shard.nbytes <= stop for start, stop in copies)


# ---------------------------------------------------------------- two configurations


def deployment(config: ModelConfig, degrees: dict[str, int]) -> Deployment:
    options = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "num_blocks": 50}
    settings = EngineConfig.from_options(**options, **degrees)
    return resolve(settings, config, Devices(9, 1 << 30, 1 << 30))


def begin(groups: list[Placed], of_phase: Deployment) -> None:
    """What runners do when they are made: pools, and the weights of every mode."""
    for placed in groups:
        placed.memory.prepare(pool_of(of_phase), None)
        for mode in placed.step.weights.modes:
            placed.memory.params(mode)


def live_bytes() -> dict[Device, int]:
    gc.collect()
    return held_bytes(jax.live_arrays())


@pytest.fixture
def others() -> Counter:
    """Bytes that other tests have left on devices."""
    return Counter(live_bytes())


@pytest.fixture
def static(others) -> dict[str, Counter]:
    """Bytes on devices after a start in one configuration alone."""
    found = {}
    for phase, degrees in DEGREES.items():
        of_phase = deployment(TIED, degrees)
        groups = define_groups(of_phase, jax.devices()[:4])
        load_weights(groups, partial(read_rows, Counted(TIED)), silent)
        begin(groups, of_phase)
        found[phase] = Counter(live_bytes()) - others
    return found


@pytest.fixture
def exchange():
    """An exchange as a start leaves it, with its groups and their deployments."""
    source = Counted(TIED)
    deployments: dict[Phase, Deployment] = {
        phase: deployment(TIED, degrees) for phase, degrees in DEGREES.items()
    }
    groups: dict[Phase, list[Placed]] = {
        phase: define_groups(of_phase, jax.devices()[:4]) for phase, of_phase in deployments.items()
    }
    exchange = DeviceExchange(groups, HostWeights(source, "float32"))
    for phase in ("decode", "prefill"):
        exchange.load(phase)
        begin(groups[phase], deployments[phase])
    return exchange, groups, deployments, source


def test_a_phase_holds_what_a_start_in_its_configuration_holds(others, static, exchange):
    """After one switch to it and after many; nothing is read again, and nothing compiled."""
    exchange, _, _, source = exchange
    assert Counter(live_bytes()) - others == static["prefill"]
    counter = CompileCounter()
    counter.start()
    for number in range(NUM_SWITCHES):
        phase = ("decode", "prefill")[number % 2]
        exchange.load(phase)
        if number in (0, 1, NUM_SWITCHES - 2, NUM_SWITCHES - 1):
            assert Counter(live_bytes()) - others == static[phase]
    counter.stop()
    assert counter.count == 0 and set(source.reads.values()) == {1}
    assert all(len(devices) == 4 for devices in static.values())


def test_the_weights_after_switches_are_those_of_a_static_start(exchange):
    exchange, groups, deployments, _ = exchange
    for phase in ("decode", "prefill", "decode"):
        exchange.load(phase)
        static = define_groups(deployments[phase], jax.devices()[:4])
        load_weights(static, partial(read_rows, Counted(TIED)), silent)
        for one, other in zip(groups[phase], static, strict=True):
            modes = {mode for mode, _ in one.memory._by_use}  # before a step asks
            assert modes == set(one.step.weights.modes)
            for mode in one.step.weights.modes:
                arrays = zip(one.memory.params(mode), other.memory.params(mode), strict=True)
                assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in arrays)
            assert all(not np.asarray(pool).any() for layer in one.memory.pools for pool in layer)


def test_bytes_that_move_are_those_of_all_devices(exchange):
    exchange, _, deployments, _ = exchange
    before = exchange.num_moved_bytes
    exchange.load("decode")
    layout, formats = deployments["decode"].layout, deployments["decode"].formats
    assert exchange.num_moved_bytes - before == 4 * weight_bytes(layout, formats)


def test_a_load_that_fails_leaves_nothing_behind(others, exchange, monkeypatch):
    """The first stage is filled by then."""
    exchange, _, _, _ = exchange
    exchange.load("decode")
    rows = exchange._rows

    def fail(weight, first, last):
        if weight.source.startswith("model.layers.1"):
            raise CheckpointError("the memory is broken")
        return rows(weight, first, last)

    monkeypatch.setattr(exchange, "_rows", fail)
    with pytest.raises(CheckpointError, match="broken"):
        exchange.load("prefill")
    assert Counter(live_bytes()) - others == Counter()
