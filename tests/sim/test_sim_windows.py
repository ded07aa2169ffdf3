"""Plans and replays of models whose KV blocks behind windows are freed."""

from functools import cache

from shiftjax.deploy.deployment import Deployment
from shiftjax.sim.estimate import Workload, estimate
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import TraceRequest

PROMPT, OUTPUT = 20_000, 100


@cache
def target() -> Target:
    return target_from({"model": "gpt-oss-120b", "machine": "h200x8", "dtype": "bfloat16"})


def deployed(frees: bool, **options) -> Deployment:
    return deploy(target(), "sp8", max_model_len=32_768, frees_blocks=frees, **options)


def test_twice_as_many_long_sequences_run_in_the_same_memory():
    requests = [TraceRequest(0.0, PROMPT, OUTPUT) for _ in range(16)]
    each = -(-(PROMPT + OUTPUT) // 16)
    seconds, pools = [], []
    for frees in (False, True):
        deployment = deployed(frees, num_blocks=1 + 4 * each + 100)  # four, if all is kept
        pools.append(deployment.num_blocks * deployment.block_bytes)
        run = replay(requests, target(), deployment)
        assert len(run.requests) == len(requests)
        queues = sorted(record.queue for record in run.requests)
        seconds.append((queues[-1], max(record.completion for record in run.requests)))
    assert abs(pools[0] / pools[1] - 1) < 1e-3
    (queued, ended), (queued_freed, ended_freed) = seconds
    assert queued_freed < 0.8 * queued and ended_freed < 0.95 * ended


def test_estimates_have_room_for_what_sequences_keep():
    long, short = Workload(PROMPT, OUTPUT), Workload(64, 32)
    kept, freed = deployed(False), deployed(True)
    rows = [estimate(target(), each, long) for each in (kept, freed)]
    assert [row.fits for row in rows] == [True, True]
    assert rows[1].tokens_per_second >= rows[0].tokens_per_second
    memory = rows[1].memory
    assert freed.kv_tokens_of(memory, PROMPT) > 1.9 * kept.kv_tokens_of(rows[0].memory, PROMPT)
    assert freed.kv_tokens_of(memory, 64) < 1.05 * kept.kv_tokens_of(rows[0].memory, 64)
    assert estimate(target(), freed, short).tokens_per_second > 0
