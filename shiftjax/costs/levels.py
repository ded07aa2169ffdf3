"""Collectives over two levels of links: those inside a host, and the network between hosts. No JAX.

Of a group with l devices on each of H hosts, every device of a host talks to its counterparts on
the others, by an adapter of its own, before or after all of a host talk to each other (BlueConnect,
Cho et al., MLSys 2019, section 3; NCCL's trees move as much). For a result of S bytes on a device:

    all-reduce      inside all of S is reduced; between hosts each device sums its S / l
    all-gather      between hosts S / l is gathered, which inside becomes S; a reduce-scatter is
                    the same the other way
    all-to-all      1 / H of S stays inside; all of S is exchanged between hosts, but for that

One level waits for the other: what NCCL hides of the quicker behind the slower is not counted. The
network's latency is that of one exchange; H hosts take log2 H of them, as recursive doubling does
(Thakur, Rabenseifner, Gropp, IJHPCA 2005). Kernels that read their peers' memory end at the host.
"""

from typing import NamedTuple

from shiftjax.costs.collectives import Collective, Kind
from shiftjax.costs.machine import Machine, Transfer


class Levels(NamedTuple):
    """What a collective does inside each host, and between the counterparts of all hosts."""

    inside: Collective
    between: Collective


def levels_of(move: Collective, devices_per_host: int) -> Levels:
    """Split a collective by the links that it uses; of one host, nothing is between.

    Its devices are `stride` apart, so a host has as many of them as fit, and one at least.
    """
    local = min(move.num_devices, max(1, devices_per_host // move.stride))
    hosts = -(-move.num_devices // local)
    inside = between = move._replace(num_bytes=_whole(move))
    if move.kind == "all-to-all":
        inside = inside._replace(num_bytes=inside.num_bytes // hosts)
    else:
        between = between._replace(num_bytes=between.num_bytes // local)
    if move.kind == "reduce-scatter":  # of what it gives back
        inside = inside._replace(num_bytes=inside.num_bytes // local)
        between = between._replace(num_bytes=between.num_bytes // hosts)
    return Levels(inside._replace(num_devices=local), between._replace(num_devices=hosts))


def ways_of(machine: Machine, kind: Kind) -> tuple[Transfer, ...]:
    """A machine's algorithms of a collective inside a host."""
    return {
        "all-reduce": machine.all_reduce,
        "all-to-all": machine.all_to_all,
        "all-gather": machine.all_gather,
        "reduce-scatter": machine.all_gather,  # as many bytes, the other way
    }[kind]


def sent_bytes(move: Collective) -> float:
    """Bytes that each device sends, and receives, in an optimal schedule."""
    times, devices = 2 if move.kind == "all-reduce" else 1, move.num_devices
    return times * (devices - 1) / devices * _whole(move)


def transfer_seconds(ways: tuple[Transfer, ...], move: Collective) -> float:
    """Seconds of one collective by the quickest of these algorithms."""
    ring, one_shot = sent_bytes(move), (move.num_devices - 1) * _whole(move)
    two_shot = (1 + 1 / move.num_devices) * _whole(move)
    volumes = {"ring": ring, "one_shot": one_shot, "two_shot": two_shot}
    return min(way.latency_seconds + volumes[way.volume] / way.bytes_per_second for way in ways)


def collective_seconds(machine: Machine, move: Collective) -> float:
    """Seconds of one collective, on all levels that its devices span."""
    inside, between = levels_of(move, machine.devices_per_host or machine.num_devices)
    ways, hosts = ways_of(machine, move.kind), between.num_devices
    if hosts == 1:
        return transfer_seconds(ways, move)
    rounds = (hosts - 1).bit_length()
    network = tuple(way.scaled(rounds, 1) for way in machine.network)
    seconds = transfer_seconds(network, between)
    if inside.num_devices > 1:
        by_network = tuple(way for way in ways if way.volume == "ring")
        seconds += transfer_seconds(by_network or ways, inside)
    return seconds


def send_seconds(ways: tuple[Transfer, ...], num_bytes: float) -> float:
    """Seconds until so many bytes have crossed a link, by the quickest way."""
    return min(way.latency_seconds + num_bytes / way.bytes_per_second for way in ways)


def _whole(move: Collective) -> int:
    """What volumes are shares of; a reduce-scatter gives back one part of it."""
    return move.num_bytes * (move.num_devices if move.kind == "reduce-scatter" else 1)
