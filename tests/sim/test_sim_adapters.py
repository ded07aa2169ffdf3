"""Adapters on simulated devices: who waits for a slot, and who does not."""

from collections import defaultdict
from random import Random

import pytest

from shiftjax.sim.experiments import target_from
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import poisson

NUM = 24
TRACE = poisson(rate=60, seconds=10, prompt_tokens=512, output_tokens=250)


def waits(slots: int) -> dict[int, list[float]]:
    """Seconds that requests wait, by adapter; the first is wanted most."""
    target = target_from({"model": "llama-8b", "machine": "h200x8"})
    modules = ",".join(f"a{nth}=a{nth}" for nth in range(NUM))
    settings = {"enable_lora": True, "max_loras": slots, "lora_modules": modules}
    run = replay(TRACE, target, deploy(target, "shift", **settings))
    assert run.num_refused == 0 and len(run.requests) == len(TRACE)
    draw, found = Random(0), defaultdict(list)
    for record in run.requests:
        (nth,) = draw.choices(range(NUM), [1 / (n + 1) for n in range(NUM)])
        found[nth].append(record.queue)
    return found


@pytest.mark.costs(20)
def test_who_has_a_slot_does_not_wait_for_those_who_have_none():
    few, enough = waits(8), waits(NUM)
    hottest = few[0]
    seldom = [wait for nth, each in few.items() if nth > 8 for wait in each]
    assert sum(hottest) / len(hottest) < 0.1 * sum(seldom) / len(seldom)
    assert 0.3 < max(seldom) < 10  # they wait for their turn, and get it
    assert max(wait for each in enough.values() for wait in each) < 0.3
