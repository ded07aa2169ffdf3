"""The least fleet on devices: two units, one layer, a request that moves while it is decoded."""

import pytest
from echo_pools import Told
from engines import checkpoint, make, tokens
from oracle import numpy_llama

from shiftjax.core.request import Event, Request, SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups


@pytest.mark.costs(15)
@pytest.mark.parametrize("kv_split", ["replicate", "position"])
def test_a_request_that_moves_gets_the_tokens_of_one_that_stays(kv_split):
    directory, config, tensors = checkpoint(num_hidden_layers=1, num_key_value_heads=1)
    sizes = {"devices": 2, "token_buckets": [32], "kv_split": kv_split}
    sizes["controls"] = {"normalisers": True}  # in SHIFT of both units, where they split positions
    built = make(directory, None, 1, fleet=True, **sizes)
    wide = built.deployment.of_width(2)
    assert wide.block_size == 4 * (1 if kv_split == "replicate" else wide.layout.position_ways)
    uses = {r.step.use_in(r.step.layout.shift, (32, 32)).queries for r in built.runners}
    assert uses == ({None} if kv_split == "replicate" else {None, wide.layout.base})
    engine, policy, counter = built.engine, Told(), CompileCounter()
    engine.topology.find(Fleet).policy = policy
    prompt, events = [(7 * i) % 190 + 3 for i in range(20)], list[Event]()
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    engine.add_request(Request("moves", prompt, greedy))
    counter.start()
    for turn in range(40):
        if turn % 8 == 4:  # from a unit to both, and back
            policy.wishes = [Wish(equal_groups(2, 2 if turn % 16 == 4 else 1), "told", "move")]
        events += engine.step(float(turn))
        engine.check()
    counter.stop()
    assert tokens(events) == numpy_llama.greedy(config, tensors, prompt, 24)
    assert engine.topology.find(Fleet).stats.num_moved_sequences >= 2
    assert counter.count == 0 and not engine.has_work()
    if kv_split == "replicate":
        find_a_prefix_of_units_in_both(built, policy, prompt, config, tensors)


def find_a_prefix_of_units_in_both(built, policy, prompt, config, tensors) -> None:
    """What a unit has cached, and found again, goes along when units are bound, and back."""
    engine, fleet = built.engine, built.engine.topology.find(Fleet)
    policy.wishes = [Wish(equal_groups(2, 1), "told", "move")]
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found, adopted = [], fleet.stats.num_adopted_blocks
    for turn in range(5):
        own, events = [*prompt[::-1], turn + 3], list[Event]()
        if turn > 2:
            policy.wishes = [Wish(equal_groups(2, 2 if turn == 3 else 1), "told", "move")]
            engine.step(100.5 + turn)
        engine.add_request(Request(f"prefix {turn}", own, sampling))
        while engine.has_work():
            events += engine.step(101.0 + turn)
            engine.check()
        assert tokens(events) == numpy_llama.greedy(config, tensors, own, 4)
        tables = [lane.scheduler.tables for lane in fleet.lanes.values()]
        found.append(sum(each.num_prefix_hit_tokens for each in tables))
    assert fleet.stats.num_adopted_blocks - adopted == 5  # the first unit still has it at the end
    assert found[3] - found[2] == found[4] - found[3] == 20
