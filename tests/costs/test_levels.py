"""Collectives over hosts: what runs inside one, what between them, and what is moved in all."""

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.collectives import Collective, Kind, context_gathers, row_exchanges
from shiftjax.costs.levels import (
    collective_seconds,
    levels_of,
    sent_bytes,
    transfer_seconds,
    ways_of,
)
from shiftjax.costs.machine import Machine, Transfer
from shiftjax.costs.machine_files import dump_machine, load_machine
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Grid, Group
from shiftjax.parallel.layout import Layout

FORMATS = Formats("bfloat16", "bfloat16", "bfloat16")
ONE = load_machine("h200x8")
TWO = load_machine("h200x8", hosts=2)
powers = st.integers(0, 4).map(lambda k: 2**k)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Collective, int, int]:
    """A collective, how many of its devices a host has, and how many devices a host has."""
    local, hosts, stride = draw(powers), draw(powers), draw(powers)
    per_host = local * stride * (draw(powers) if hosts == 1 else 1)
    num_bytes = draw(st.integers(1, 1 << 20)) * local * hosts
    return Collective(draw(kinds), local * hosts, num_bytes, 1, stride), local, per_host


kinds = st.sampled_from(get_args(Kind))


@given(moves())
def test_both_levels_together_move_what_one_would(given_move):
    """An optimal schedule stays one: two levels only say which link the bytes take."""
    move, local, per_host = given_move
    inside, between = levels_of(move, per_host)
    assert inside.num_devices == local
    assert inside.num_devices * between.num_devices == move.num_devices
    assert sent_bytes(inside) + sent_bytes(between) == pytest.approx(sent_bytes(move))


@given(kinds, powers, st.integers(1, 1 << 30))
def test_a_group_inside_a_host_costs_what_it_does_on_one_host(kind, stride, num_bytes):
    move = Collective(kind, max(2, 8 // stride), num_bytes, 1, stride)
    if stride > 4:
        move = move._replace(stride=4)
    expected = transfer_seconds(ways_of(ONE, kind), move)
    assert collective_seconds(ONE, move) == collective_seconds(TWO, move) == expected


def slow(network: Transfer) -> Machine:
    """Two hosts of two devices whose own links take no time at all, joined by this."""
    free = (Transfer(0.0, 1e30),)
    own = {name: free for name in ("all_reduce", "all_to_all", "all_gather")}
    return replace(ONE, num_devices=4, devices_per_host=2, network=(network,), **own)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-reduce", 400.0),  # each device sums half of the result: there, and back
        ("all-gather", 200.0),  # half of it is of the other host: each device asks for its share
        ("reduce-scatter", 800.0),  # the whole is four times what is given back
        ("all-to-all", 400.0),  # half of it comes from the other host
    ],
)
def test_between_two_hosts_of_two_devices(kind, seconds):
    move = Collective(kind, 4, 800, 1)
    assert collective_seconds(slow(Transfer(0.0, 1.0)), move) == pytest.approx(seconds)


def test_latencies_of_the_network_grow_with_the_logarithm_of_hosts():
    machine = slow(Transfer(1.0, 1e30))
    took = [
        collective_seconds(machine.over(hosts), Collective("all-gather", 2 * hosts, 1, 1))
        for hosts in (1, 2, 4, 5)
    ]
    assert took == pytest.approx([0.0, 1.0, 2.0, 3.0])


def test_what_reads_its_peers_memory_ends_at_the_host():
    """The quick way of small sums is for one host; between hosts the other one runs inside, too."""
    move = Collective("all-reduce", 16, 8, 1)
    own = (Transfer(1e-6, 1e12, "one_shot"), Transfer(5e-6, 1e12))
    machine = replace(TWO, all_reduce=own, network=(Transfer(10e-6, 1e12),))
    assert collective_seconds(machine, move) == pytest.approx(15e-6)
    assert collective_seconds(machine, move._replace(num_devices=8)) == pytest.approx(
        1e-6, rel=1e-3
    )


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_neighbours_that_split_positions_may_be_on_several_hosts(num_kv_heads, hosts):
    """Of units inside hosts; which devices they are is read off the grid."""
    model, found = replace(PRESETS["llama-70b"], num_kv_heads=num_kv_heads), set()
    for sp, tp in ((16, 1), (8, 2), (4, 4), (2, 8), (1, 16)):
        layout, per_host = Layout(model, sp, tp, by_position=True), sp * tp // hosts
        if 1 < sp < hosts:
            continue
        ways, places = layout.position_ways, Grid(tp, sp).devices_of(Group(0, sp))
        groups = [places[first : first + ways] for first in range(0, sp * tp, ways)]
        spread = {tuple(sorted(Counter(d // per_host for d in g).values())) for g in groups}
        for move in (*row_exchanges(layout, 3, 2), *context_gathers(layout, FORMATS, 9)):
            inside, between = levels_of(move, per_host)
            assert spread == {(inside.num_devices,) * between.num_devices}
            found.add(between.num_devices)
    assert max(found) == hosts


def test_hosts_multiply_a_machine():
    assert (TWO.num_devices, TWO.devices_per_host, TWO.num_hosts) == (16, 8, 2)
    assert TWO.host_memory_bytes == 2 * ONE.host_memory_bytes
    assert load_machine("h200x8", hosts=1) == ONE and ONE.num_hosts == 1
    assert TWO.one_host.num_devices == 8 and TWO.one_host.num_hosts == 1
    assert TWO.over(4).over(2) == TWO


@pytest.mark.parametrize("hosts", [0, -1, 65, 10**99])
def test_hosts_that_there_cannot_be(hosts):
    with pytest.raises(ConfigError, match="hosts must be 1 to 64"):
        load_machine("h200x8", hosts)


def test_hosts_without_a_network_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="l4x8 has no network between hosts"):
        load_machine("l4x8", hosts=2)
    file = tmp_path / "mine.yaml"
    file.write_text(dump_machine(TWO, "a test"))
    assert load_machine(str(file)) == TWO
    data = yaml.safe_load(file.read_text())
    data["num_devices"]["value"] = 12
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match="a multiple of devices_per_host"):
        load_machine(str(file))
