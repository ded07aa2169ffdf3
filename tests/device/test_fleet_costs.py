"""What a switch of groups costs: nothing is compiled, nothing is kept, no weight is copied."""

import gc
from pathlib import Path

import jax
import pytest
from echo_pools import Told
from engines import checkpoint, make, run, tokens

from shiftjax.build import Built
from shiftjax.core.request import Request, SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.fleet import mover_device as mover
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups
from shiftjax.parallel.grid import Group

UNITS, WIDTHS = 4, (1, 2)  # two groups of two: what one compiles, the other loads
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True}


@pytest.fixture(scope="module")
def built() -> Built:
    return make(
        checkpoint(**SIZES)[0],
        None,
        1,
        fleet=True,
        devices=UNITS,
        fleet_widths=WIDTHS,
        fleet_policy="context",
        num_blocks=40,
        token_buckets=[16],
        max_num_batched_tokens=16,
    )


def switch(built: Built, width: int, now: float) -> None:
    """All units form groups of a width, between two steps."""
    fleet = built.engine.topology.find(Fleet)
    fleet.policy = Told()
    fleet.policy.wishes = [Wish(equal_groups(UNITS, width), "told", "move")]
    fleet.turn(lambda _: [], 0, 0, now)
    assert fleet.arrangement == equal_groups(UNITS, width)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.thorough
def test_a_thousand_switches_compile_nothing_and_keep_nothing(built):
    """And what a sequence has computed survives them."""
    greedy = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
    prompt = [5, 6, 7, 8] * 5
    (wanted,) = (tokens(each) for each in run(built.engine, [prompt], [greedy]).values())
    built.engine.flush_prefix_cache()
    built.engine.overlap = False  # so that nothing is in flight between two turns
    built.engine.add_request(Request("a", prompt, greedy))
    events = [event for turn in range(8) for event in built.engine.step(float(turn))]
    counter, arrays, resident = CompileCounter(), [], []
    counter.start()
    for number in range(1000):
        switch(built, WIDTHS[(number + 1) % 2], 100.0 + number)
        if number % 100 == 99:
            jax.block_until_ready([runner.memory.pools for runner in built.runners])
            arrays.append(len(jax.live_arrays()))
            resident.append(resident_bytes())
    counter.stop()
    assert counter.count == 0
    assert len(set(arrays)) == 1
    assert resident[-1] - resident[1] < 4 << 20
    assert built.engine.topology.find(Fleet).stats.num_moved_sequences >= 1000
    assert built.engine.topology.find(Fleet).stats.num_recomputed_sequences == 0
    while built.engine.has_work():
        events += built.engine.step(2000.0)
    assert [token for event in events for token in event.token_ids] == wanted


@pytest.mark.thorough
def test_weights_of_every_group_and_mode_lie_in_those_of_its_units(built):
    """But for biases, which are copied where they are split."""
    fleet = built.engine.topology.find(Fleet)
    runners = dict(zip(fleet.lanes, built.runners, strict=True))
    stored = {}
    for unit in range(UNITS):
        runner = runners[Group(unit, 1)]
        (device,) = runner.memory.mesh.devices.flat
        stored[device] = runner.memory.params(runner.step.layout.base)
    num_views = 0
    for runner in built.runners:
        for mode in runner.step.layout.modes:
            params = runner.memory.params(mode)
            for number, (weight, array) in enumerate(
                zip(runner.step.model.declared, params, strict=True)
            ):
                for shard in array.addressable_shards:
                    whole = stored[shard.device][number].addressable_data(0)
                    offset = shard.data.unsafe_buffer_pointer() - whole.unsafe_buffer_pointer()
                    is_inside = 0 <= offset <= whole.nbytes - shard.data.nbytes
                    is_part = shard.data.nbytes < whole.nbytes
                    assert is_inside or (is_part and weight.kind == "bias"), (weight.name, mode)
                    num_views += is_inside and is_part
    assert num_views


@pytest.fixture
def compiled(monkeypatch, uncached) -> list:
    """The first devices of every exchange, and of every copy, that is compiled.

    What comes out of the compilation cache could not be loaded (device/programs.py).
    """
    noted, exchange, copies = [], mover.compile_exchange, mover.compile_copies

    def compile_exchange(mesh, *layouts):
        noted.append(("exchange", mesh.devices.flat[0].id))
        return exchange(mesh, *layouts)

    def compile_copies(mesh, *sizes):
        noted.append(("copies", mesh.size, mesh.devices.flat[0].id))
        return copies(mesh, *sizes)

    monkeypatch.setattr(mover, "compile_exchange", compile_exchange)
    monkeypatch.setattr(mover, "compile_copies", compile_copies)
    return noted


def new_mover(built: Built) -> mover.DeviceMover:
    runners = dict(zip(built.engine.topology.find(Fleet).lanes, built.runners, strict=True))
    memories = {group: runner.memory for group, runner in runners.items()}
    return mover.DeviceMover(memories, {g.width: r.pool for g, r in runners.items()})


@pytest.mark.thorough
def test_moves_are_compiled_for_one_group_of_a_width_and_loaded_on_the_others(built, compiled):
    new_mover(built)
    assert sorted(compiled) == [("copies", 1, 0), ("copies", 2, 0), ("exchange", 0)]


@pytest.mark.costs(15)
def test_moves_that_cannot_be_loaded_are_compiled(built, compiled, monkeypatch):
    def fail(*_):
        raise RuntimeError("not on this backend")

    monkeypatch.setattr(mover, "load_on", fail)
    made = new_mover(built)
    assert sorted(each for each in compiled if each[0] == "exchange") == [
        ("exchange", 0),
        ("exchange", 2),
    ]
    assert len(compiled) == 2 + UNITS + UNITS // 2
    assert set(made._copies) == set(built.engine.topology.find(Fleet).lanes)
