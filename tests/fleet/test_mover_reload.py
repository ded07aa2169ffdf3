"""Moves between groups where a program cannot be loaded on other devices, as on a warm CPU."""

import pytest
from engines import checkpoint, make, run, tokens

from shiftjax.core.request import SamplingParams
from shiftjax.fleet import mover_device as mover
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.grid import Group

pytestmark = pytest.mark.thorough


def test_a_move_that_does_not_run_where_it_is_loaded_leaves_whole_pools(monkeypatch):
    tried = []

    def load(exchange, devices, others):
        def fails(pools, *numbers):
            tried.append(others)
            for array in (array for layer in pools for array in layer):
                array.delete()  # what it was given is gone, as after a step that has failed
            raise RuntimeError("a program that does not run here")

        return exchange._replace(to_wide=fails)

    def load_some(made, devices, others):
        wanted = isinstance(made, mover.Exchange)
        return load(made, devices, others) if wanted else really_load(made, devices, others)

    really_load = mover.load_programs
    monkeypatch.setattr(mover, "load_programs", load_some)
    directory, *_ = checkpoint()
    small = {"token_buckets": [8], "max_num_batched_tokens": 8, "num_blocks": 20}
    fleet = {"fleet": True, "devices": 4, "fleet_widths": (1, 2), "fleet_policy": "fixed:2+2"}
    built = make(directory, None, 1, **fleet, **small)
    assert len(tried) == 1
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = run(built.engine, [[5, 6], [5, 6]], [greedy, greedy])
    assert tokens(found[0, 0]) == tokens(found[1, 0])
    assert built.engine.stats().num_failed_steps == 0
    for group in (Group(0, 2), Group(2, 2)):  # each had one
        assert (
            built.engine.topology.find(Fleet).lanes[group].scheduler.tables.num_prefix_query_tokens
            == 2
        )
