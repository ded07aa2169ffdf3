"""Devices as a grid: groups share none, places are in KV order, modes are the divisors."""

import numpy as np
import pytest

from shiftjax.parallel.grid import Grid, Group, Mode, strides


def test_the_devices_of_the_picture():
    grid = Grid(tp=2, units=4)
    assert grid.devices_of(Group(0, 4)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert [grid.devices_of(group) for group in grid.groups(2)] == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert [grid.devices_of(group) for group in grid.groups(1)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("grid", [Grid(1, 8), Grid(2, 6), Grid(3, 2), Grid(2, 4, pp=3)])
def test_groups_and_stages_share_the_devices_out(grid):
    for width in (w for w in range(1, grid.units + 1) if grid.units % w == 0):
        groups = grid.groups(width)
        devices = [
            device
            for stage in range(grid.pp)
            for group in groups
            for device in grid.devices_of(group, stage)
        ]
        assert sorted(devices) == list(range(grid.num_devices))


def test_units_that_cannot_be_cut_evenly_are_refused():
    with pytest.raises(ValueError, match="6 units cannot be cut into groups of 4"):
        Grid(2, 6).groups(4)


def test_modes_are_the_divisors_of_the_width_from_base_to_shift():
    assert Group(4, 4).modes == (Mode(4, 4), Mode(4, 2), Mode(4, 1))
    assert [mode.label for mode in Group(0, 6).modes] == ["base", "sp3", "sp2", "shift"]
    assert [mode.label for mode in Group(0, 1).modes] == ["shift"]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_weights_are_split_inside_hosts_as_far_as_a_host_goes(tp, hosts):
    """Devices count host by host. Where a mode splits weights no further, no sum crosses."""
    per_host, units = 8, hosts * 8 // tp
    for mode in Group(0, units).modes:
        places = np.array(Grid(tp, units).devices_of(Group(0, units)))
        mesh = places.reshape(tp, units // mode.sp, mode.sp)  # as `device.mesh` has its axes
        weights, tokens = mesh.reshape(-1, mode.sp).T, mesh.reshape(-1, mode.sp)
        for groups, stride in zip((weights, tokens), strides(mode, tp), strict=True):
            members = min(groups.shape[1], max(1, per_host // stride))
            for group in groups:
                _, counts = np.unique(group // per_host, return_counts=True)
                assert set(counts) == {members}
        if weights.shape[1] <= per_host:
            assert all(len(set(group // per_host)) == 1 for group in weights)


def test_in_the_natural_order_modes_between_split_weights_over_units_that_are_apart():
    assert strides(Mode(6, 2), 4) == (2, 4)
    assert strides(Mode(6, 6), 4) == strides(Mode(8, 8), 4) == (1, 4)
