"""Steps of Llama-70B compiled for two hosts of 8 H200s: what crosses hosts, and what does not.

Shapes of the 70B with one layer stand for all 80. That a collective's devices are on one host is
read off the program, not off the formulas that it is compared with.
"""

import functools
from collections import Counter
from collections.abc import Callable

import aot
import pytest
from hlo import groups_of, instructions, shape_bytes

from serving.bench.hlo import COLLECTIVES
from shiftjax.costs.collectives import Collective
from shiftjax.costs.levels import levels_of, sent_bytes
from shiftjax.device.all_reduces import all_reduce_kind
from shiftjax.parallel.grid import Mode

aot.require()
pytestmark = pytest.mark.thorough

from steps import CHIP, Case, CompiledStep, compile_step, predicted_moves  # noqa: E402

HOSTS, PER_HOST = 2, 8
SP, TP = 8, 2
BASE, INSIDE, SHIFT = (Mode(SP, sp) for sp in (SP, HOSTS, 1))
# Of a group, devices on a host and hosts: those that split weights, and tokens. In the mode between
# the units of a host split the weights, for they are neighbours in the order of places.
LINKS = {
    BASE: ((TP, 1), (PER_HOST // TP, HOSTS)),
    INSIDE: ((PER_HOST, 1), (1, HOSTS)),
    SHIFT: ((PER_HOST, HOSTS), (PER_HOST, HOSTS)),
}
CASES = [Case(SP, TP, mode, num_layers=1) for mode in (BASE, INSIDE, SHIFT)]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.mode.label)


@pytest.fixture(scope="module")
def compiled() -> Callable[[Case], CompiledStep]:
    """The program of a case."""
    mesh = aot.make_mesh(CHIP, (HOSTS * PER_HOST,), ("x",), hosts=HOSTS)
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    return functools.cache(lambda case: compile_step(case, devices))


def found(one: CompiledStep) -> Counter:
    """(kind, bytes, devices of a group on a host, hosts of a group) of every collective."""
    host = [device.process_index for device in one.step.mesh.devices.flat]
    begun = {i.name: i for i in instructions(one.text) if i.opcode.endswith("-start")}
    counted: Counter = Counter()
    for each in instructions(one.text):
        kind = each.opcode.removesuffix("-done")
        if kind in COLLECTIVES:
            start = begun[each.operands[0]] if kind != each.opcode else each
            groups = [Counter(host[place] for place in group) for group in groups_of(start)]
            assert len({tuple(sorted(group.values())) for group in groups}) == 1
            sizes = set(groups[0].values())
            assert len(sizes) == 1  # as many on each host
            counted[kind, shape_bytes(each.shape), sizes.pop(), len(groups[0])] += 1
    return counted


@every_case
def test_every_collective_runs_over_the_links_that_the_costs_have(case, compiled):
    one, predicted = compiled(case), Counter()
    for move in predicted_moves(one):
        inside, between = levels_of(move, PER_HOST)
        sizes = move.kind, move.num_bytes, inside.num_devices, between.num_devices
        predicted[sizes] += move.num_times
    assert found(one) == predicted


@every_case
def test_layers_sum_inside_hosts_and_exchange_between_them(case, compiled):
    """But in shift: it splits the weights over both. Few rows cross in every mode."""
    layers, rows = LINKS[case.mode]
    one = compiled(case)
    sums = {key[2:] for key in found(one) if key[0] == "all-reduce"}
    exchanges = {key[2:] for key in found(one) if key[0] == "all-to-all"}
    assert sums == {layers, rows, (PER_HOST, HOSTS)}  # what was sampled goes everywhere
    assert exchanges == ({rows} if case.mode.sp > 1 else set())


@every_case
def test_kernels_that_read_their_peers_memory_end_at_the_host(case, compiled):
    """XLA's quick sums inside a host, NCCL's between: no memory of another host can be read."""
    one = compiled(case)
    host = [device.process_index for device in one.step.mesh.devices.flat]
    sums = [each for each in instructions(one.text) if each.opcode == "all-reduce"]
    assert sums
    for each in sums:
        crosses = any(len({host[place] for place in group}) > 1 for group in groups_of(each))
        assert not crosses or all_reduce_kind(each.rest) == "nccl"
    if case.mode == INSIDE:
        assert any(all_reduce_kind(each.rest) != "nccl" for each in sums)


def least_crossing(kind: str, num_bytes: int, local: int) -> float:
    """Bytes of one device that must leave its host, of two: from who needs what of whom."""
    members = 2 * local
    return {
        "all-to-all": num_bytes / members * local,  # a part for each device over there
        "all-reduce": num_bytes / local,  # its share of what its host has summed, there and back
        "all-gather": num_bytes / members,  # its own part once; their neighbours pass it on
    }[kind]


@every_case
def test_bytes_between_hosts_are_those_that_have_to_cross(case, compiled):
    one, total = compiled(case), 0.0
    for (kind, num_bytes, local, hosts), count in found(one).items():
        move = Collective(kind, local * hosts, num_bytes, 1, PER_HOST // local)
        sent = sent_bytes(levels_of(move, PER_HOST).between)
        assert sent == (least_crossing(kind, num_bytes, local) if hosts > 1 else 0)
        total += count * sent
    assert total > 0
